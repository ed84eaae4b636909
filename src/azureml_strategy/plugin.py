"""Registers the strategy names with Lightning, and supplies the callbacks that each Trainer in a job gets."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from azureml_strategy.cluster.environ import (
    CALLBACKS_SWITCH,
    CHECKPOINT_SWITCH,
    CLI_CONFIG_SWITCH,
    COMPILE_CACHE_SWITCH,
    DATA_CHECK_SWITCH,
    GUARD_SWITCH,
    HANG_WATCH_SWITCH,
    LAUNCH_SWITCH,
    NETWORK_RECORD_SWITCH,
    PRETEND_VARIABLE,
    REPLICA_CHECK_SWITCH,
    TERMINATION_SWITCH,
    THROUGHPUT_SWITCH,
    TRACKING_SWITCH,
    LaunchError,
    in_azure_ml,
    switched_off,
)
from azureml_strategy.import_hook import when_imported

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from azureml_strategy.cluster.guard import FabricGuard
    from azureml_strategy.cluster.launch import Launch, PartialLaunch

log = logging.getLogger(__name__)
Made = TypeVar("Made")


# A script that never mentions this package has this function called by the entry point `torch.backends`, which torch
# loads at the end of its own import. Lightning imports torch before it makes its registries. The entry point of the
# callbacks would come too late: a Trainer asks the registries for its strategy before it asks for callbacks. A .pth
# file would run in every Python program of the environment, pip included, and no build backend installs one from
# pyproject.toml. An error here would break `import torch`, so this does next to nothing. With
# TORCH_DEVICE_BACKEND_AUTOLOAD=0 torch does not call it; then the guard stops what would train alone.
@cache  # by that entry point, and by `import azureml_strategy`
def register_when_lightning_is_imported() -> None:
    """Register the strategy names now if Lightning is imported, or else as soon as the script imports it."""
    when_imported("lightning.pytorch.strategies", _register)
    when_imported("lightning.fabric.strategies", _register_in_fabric)
    when_imported("pytorch_lightning.strategies", _register_refusals)
    for connector in CONNECTORS:
        when_imported(connector, _take_launch_for_mpi)
    if in_azure_ml(os.environ) and not switched_off(os.environ, TRACKING_SWITCH):
        join = partial(_make, "azureml_strategy.tracking.run", "join_job_run")
        when_imported("mlflow.tracking.fluent", join)
    if PRETEND_VARIABLE in os.environ:
        when_imported("lightning.pytorch", partial(_make, "azureml_strategy.planning.pretending", "begin"))


def job_callbacks() -> list[Callback]:
    """Return the callbacks that Lightning adds to every Trainer.

    Some are for a distributed job, one for any job, those that track the training for any job with an MLflow run.
    Elsewhere there are none. Each callback has a switch. A callback that cannot be loaded is left out with a warning.

    Raises:
        LaunchError: this process cannot know its rank.
    """
    from azureml_strategy.cluster.job import read_job

    if switched_off(os.environ, CALLBACKS_SWITCH) or _works_alone():
        return []
    launch = _launch()
    if launch is None or launch.rank == 0:
        _warn_of_variables()
    parts: dict[str, Callable[[], Callback | None]] = {}
    if launch is not None:
        parts |= {switch: partial(make, launch) for switch, make in _MAKERS.items()}
    if "lightning.pytorch.cli" in sys.modules:
        parts[CLI_CONFIG_SWITCH] = partial(_make, "azureml_strategy.tracking.job_tracking", "LightningCLIConfig")
    if read_job() is not None:
        parts[COMPILE_CACHE_SWITCH] = partial(_make, "azureml_strategy.strategies.compilation.cache", "CompileCache")
    if read_job() is not None and "MLFLOW_TRACKING_URI" in os.environ:
        # The second logs through the logger that the first adds.
        parts |= {
            TRACKING_SWITCH: partial(_make, "azureml_strategy.tracking.job_tracking", "JobTracking", launch),
            THROUGHPUT_SWITCH: partial(_make, "azureml_strategy.tracking.job_tracking", "JobThroughput"),
        }
    made = [_made_or_warned(switch, make) for switch, make in parts.items() if not switched_off(os.environ, switch)]
    alone = _callbacks_without_launcher() if launch is None else []
    return [*alone, *(callback for callback in made if callback is not None)]


@cache
def _warn_of_variables() -> None:
    """Warn once in a process of our variables that have no effect."""
    from azureml_strategy.cluster.environ import variables_without_effect

    for text in variables_without_effect(os.environ):
        log.warning(text)


def _callbacks_without_launcher() -> list[Callback]:
    """The callbacks of a process that trains alone: checkpoints if the switch asks for them, and a stop that saves."""
    off = switched_off(os.environ, CHECKPOINT_SWITCH)
    checkpoint = None if off else _made_or_warned(CHECKPOINT_SWITCH, _checkpoint)
    if checkpoint is None:
        return []
    if not _checkpoint_switch() or switched_off(os.environ, TERMINATION_SWITCH):
        return [checkpoint]  # if the switch has no value, it writes no checkpoint, and no stop has to wait for one
    termination = _made_or_warned(TERMINATION_SWITCH, _termination)
    return [checkpoint] if termination is None else [termination, checkpoint]


def pytorch_lightning_callbacks() -> list[Callback]:
    """Return the callbacks for `pytorch_lightning`, the separate copy of Lightning: in a distributed job the guard.

    The other callbacks need the loops of `lightning`.

    Raises:
        LaunchError: this process cannot know its rank.
    """
    return _guards("azureml_strategy.cluster.pytorch_lightning_guard", "PytorchLightningGuard")


def fabric_callbacks() -> list[FabricGuard]:
    """Return what Lightning adds to every Fabric: in a distributed job the guard.

    Raises:
        LaunchError: this process cannot know its rank, or the Fabric that is being made contradicts the job.
    """
    return _guards("azureml_strategy.cluster.guard", "FabricGuard")


def _guards(module: str, name: str) -> list[Any]:
    launch = None if switched_off(os.environ, GUARD_SWITCH) else _launch()
    guard = _made_or_warned(GUARD_SWITCH, partial(_make, module, name, launch)) if launch is not None else None
    return [guard] if guard is not None else []


def _launch() -> Launch | PartialLaunch | None:
    """Return what is known of this process's launch; None if nothing needs it."""
    from azureml_strategy.cluster.launchers import detect_ranks

    return None if switched_off(os.environ, CALLBACKS_SWITCH) or _works_alone() else detect_ranks()


def _works_alone() -> bool:
    """Whether the rank is unknown, and the user has switched the guard off, as for the workers of a parallel job."""
    from azureml_strategy.cluster.launchers import detect_ranks

    try:
        detect_ranks()
    except LaunchError:
        return switched_off(os.environ, GUARD_SWITCH)
    return False


def _made_or_warned(switch: str, make: Callable[[], Made]) -> Made | None:
    try:
        return make()
    except LaunchError:
        raise
    except Exception as fault:
        from azureml_strategy.cluster.isolation import fault_text

        log.warning(fault_text("A callback", switch, fault))
        return None


def _make(module: str, name: str, /, *arguments: Any, **named: Any) -> Any:
    """Import a class or function and call it. Most processes that import torch need none of these modules."""
    return getattr(import_module(module), name)(*arguments, **named)


_termination = partial(_make, "azureml_strategy.preemption.termination", "TerminateTogether")


def _checkpoint_switch() -> str:
    return os.environ.get(CHECKPOINT_SWITCH, "").strip().lower()


def _checkpoint(launch: Launch | PartialLaunch | None = None) -> Callback | None:
    from azureml_strategy.cluster.job import read_job

    word = _checkpoint_switch()
    job = None if word else read_job()
    if not word and (job is None or job.attempt == 0):
        return None
    from azureml_strategy.checkpoint.automatic import WORDS, AutomaticCheckpoint, RestartNotice

    if not word:
        return RestartNotice()
    if word not in WORDS:
        if launch is None or launch.rank == 0:
            log.warning(
                "%s=%s is no word for it: no checkpoint is written. Set it to `auto`, to go on from this job's newest "
                "checkpoint; `any`, from the newest whichever job wrote it; `never`; or `off` for no checkpoint.",
                CHECKPOINT_SWITCH,
                word,
            )
        return None
    return AutomaticCheckpoint(word)


# switch: function that makes the callback, if it is asked for
_MAKERS: dict[str, Callable[[Launch | PartialLaunch], Callback | None]] = {
    GUARD_SWITCH: partial(_make, "azureml_strategy.cluster.guard", "LaunchGuard"),
    HANG_WATCH_SWITCH: lambda _: _make("azureml_strategy.hang_detection", "HangWatch"),
    TERMINATION_SWITCH: lambda _: _termination(),
    NETWORK_RECORD_SWITCH: lambda _: _make("azureml_strategy.tracking.network", "NetworkRecorder"),
    DATA_CHECK_SWITCH: lambda _: _make("azureml_strategy.strategies.replica_check.data_check", "DataCheck"),
    REPLICA_CHECK_SWITCH: lambda _: _make("azureml_strategy.strategies.replica_check", "ReplicaCheck"),
    CHECKPOINT_SWITCH: _checkpoint,
}


def _register(strategies: ModuleType) -> None:
    """Register functions instead of classes: Lightning may be half imported here, even by this package itself."""
    for name, (kind, description, arguments) in _STRATEGIES.items():
        make = partial(_make, "azureml_strategy.strategies", kind)
        strategies.StrategyRegistry.register(name, make, description=description, **arguments)
    make_ddp = partial(_make, "azureml_strategy.strategies", "AzureMLDDPStrategy")
    _replace_in_jobs(strategies.StrategyRegistry, make_ddp)


def _register_in_fabric(strategies: ModuleType) -> None:
    make_of = {kind: partial(_make, "azureml_strategy.strategies.fabric", its) for kind, its in _IN_FABRIC.items()}
    for name, (kind, description, arguments) in _STRATEGIES.items():
        make = make_of.get(kind, _refuse_in_fabric)
        strategies.STRATEGY_REGISTRY.register(name, make, description=description, **arguments)
    _replace_in_jobs(strategies.STRATEGY_REGISTRY, make_of["AzureMLDDPStrategy"])


def _replace_in_jobs(registry: Any, maker: Callable[..., Any]) -> None:
    """Let Lightning's own names for DDP give ours in a distributed job, which takes its numbers from the job."""
    for name in _REPLACED & registry.keys():
        stock = registry[name]
        either = partial(_ours_in_job, maker, stock["strategy"])
        registry.register(name, either, description=stock["description"], override=True, **stock["init_params"])


def _ours_in_job(ours: Callable[..., Any], stock: Callable[..., Any], **arguments: Any) -> Any:
    if switched_off(os.environ, LAUNCH_SWITCH) or _launch() is None:
        return stock(**arguments)
    strategy = ours(gradient_as_bucket_view=False, **arguments)  # as in Lightning: a script may replace gradients
    strategy.prefer_plugins()
    return strategy


def _take_launch_for_mpi(connector: ModuleType) -> None:
    """Let a Trainer or Fabric of a job take its ranks from the launch, where it would ask MPI.

    If a strategy is given by its name, Lightning chooses the source of ranks before it makes the strategy. It asks
    MPIEnvironment, which starts MPI wherever mpi4py is installed, even if mpirun has not started the job. Where MPI is
    broken, as in an image without ssh, MPI_Init ends the process before any error in Python. `AzureMLEnvironment` gives
    the same ranks.
    """
    stock = connector.MPIEnvironment

    class LaunchOrMPI:
        """Replaces MPIEnvironment in Lightning's list of environments. Outside a job it makes an MPIEnvironment."""

        def __new__(cls) -> Any:
            if _asks_mpi():
                return stock()
            from azureml_strategy.cluster.environment import AzureMLEnvironment

            return AzureMLEnvironment()

        @staticmethod
        def detect() -> bool:
            # In a job it is chosen where MPI knows of other processes. There a stock strategy took its ranks from MPI.
            return bool(stock.detect()) if _asks_mpi() else _started_by_mpirun()

    connector.MPIEnvironment = LaunchOrMPI  # type: ignore[attr-defined]


def _asks_mpi() -> bool:
    return switched_off(os.environ, LAUNCH_SWITCH) or not in_azure_ml(os.environ)


def _started_by_mpirun() -> bool:
    from azureml_strategy.cluster.launch import Launch

    launch = _launch()
    several = isinstance(launch, Launch) and launch.launcher == "mpi" and launch.world_size > 1
    return several and importlib.util.find_spec("mpi4py") is not None


def _register_refusals(strategies: ModuleType) -> None:
    """Register a refusal: `pytorch_lightning` is a copy of Lightning with its own classes, where ours cannot work."""
    for name in _STRATEGIES:
        strategies.StrategyRegistry.register(name, _refuse, description="needs the `lightning` package")


def _refuse(**arguments: Any) -> NoReturn:
    raise ImportError(
        "azureml-strategy works with the `lightning` package, but this Trainer comes from `pytorch_lightning`, a "
        "separate copy with classes of its own. Write `from lightning.pytorch import Trainer` instead of "
        "`from pytorch_lightning import Trainer`, and likewise for LightningModule and callbacks."
    )


def _refuse_in_fabric(**arguments: Any) -> NoReturn:
    raise NotImplementedError(
        "This strategy needs the loops of a Trainer, which tell it of the passes of a pipeline and the steps and "
        "validations of local SGD; Fabric has none. Write Fabric(strategy='azureml_ddp'); 'azureml_model_parallel' or "
        "'azureml_deepspeed_stage_3' for a large model; or train it by lightning.pytorch.Trainer."
    )


# Modules of both copies of Lightning that choose where ranks come from, in the Trainer and in Fabric.
CONNECTORS = (
    "lightning.pytorch.trainer.connectors.accelerator_connector",
    "lightning.fabric.connector",
    "pytorch_lightning.trainer.connectors.accelerator_connector",
    "lightning_fabric.connector",
)
# Lightning's names of strategies that start the script again for each process, or are started by a launcher.
_REPLACED = {"ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false"}
# The strategies that Fabric has too: the class for the Trainer, and the class for Fabric.
_IN_FABRIC = {
    "AzureMLDDPStrategy": "FabricDDPStrategy",
    "AzureMLModelParallelStrategy": "FabricModelParallelStrategy",
    "AzureMLDeepSpeedStrategy": "FabricDeepSpeedStrategy",
}
# name: (class, description, arguments)
_STRATEGIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "azureml_ddp": ("AzureMLDDPStrategy", "DDP with processes from the Azure ML job", {}),
    "azureml_ddp_find_unused_parameters_true": (
        "AzureMLDDPStrategy",
        "azureml_ddp for models whose forward leaves parameters out",
        {"find_unused_parameters": True},
    ),
    "azureml_ddp_notebook": ("AzureMLDDPStrategy", "azureml_ddp that forks its processes", {"start_method": "fork"}),
    "azureml_ddp_notebook_find_unused_parameters_true": (
        "AzureMLDDPStrategy",
        "azureml_ddp_notebook for models whose forward leaves parameters out",
        {"start_method": "fork", "find_unused_parameters": True},
    ),
    "azureml_deepspeed": ("AzureMLDeepSpeedStrategy", "DeepSpeed ZeRO stage 2 with processes from the job", {}),
    "azureml_deepspeed_stage_1": (
        "AzureMLDeepSpeedStrategy",
        "ZeRO with optimizer states cut over the processes",
        {"stage": 1},
    ),
    "azureml_deepspeed_stage_2": ("AzureMLDeepSpeedStrategy", "ZeRO with gradients cut too", {"stage": 2}),
    "azureml_deepspeed_stage_3": ("AzureMLDeepSpeedStrategy", "ZeRO with parameters cut too", {"stage": 3}),
    "azureml_deepspeed_stage_3_offload": (
        "AzureMLDeepSpeedStrategy",
        "ZeRO stage 3 with parameters and optimizer states in the memory of the host",
        {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    ),
    "azureml_local_sgd": (
        "AzureMLLocalSGDStrategy",
        "replicas that average their parameters every 16 steps, for slow networks",
        {},
    ),
    "azureml_diloco": (
        "AzureMLLocalSGDStrategy",
        "azureml_local_sgd with DiLoCo's outer optimizer, every 32 steps",
        {"period": 32, "outer_learning_rate": 0.7},
    ),
    "azureml_deepspeed_pipeline": ("PipelineStrategy", "DeepSpeed pipeline stages with processes from the job", {}),
    "azureml_model_parallel": (
        "AzureMLModelParallelStrategy",
        "FSDP2 and tensor parallelism with processes from the job",
        {},
    ),
}
