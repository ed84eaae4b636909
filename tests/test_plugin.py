from __future__ import annotations

import pickle
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry

from azureml_strategy.cluster.environ import (
    CALLBACKS_SWITCH,
    COMPILE_CACHE_SWITCH,
    DATA_CHECK_SWITCH,
    GUARD_SWITCH,
    HANG_WATCH_SWITCH,
    LAUNCH_SWITCH,
    NETWORK_RECORD_SWITCH,
    REPLICA_CHECK_SWITCH,
    TERMINATION_SWITCH,
    THROUGHPUT_SWITCH,
    TRACKING_SWITCH,
    LaunchError,
)
from azureml_strategy.cluster.guard import LaunchGuard
from azureml_strategy.hang_detection import HangWatch
from azureml_strategy.plugin import (
    _STRATEGIES,
    fabric_callbacks,
    job_callbacks,
    pytorch_lightning_callbacks,
    register_when_lightning_is_imported,
)
from azureml_strategy.preemption.termination import TerminateTogether
from azureml_strategy.strategies import AzureMLDDPStrategy
from azureml_strategy.strategies.compilation.cache import CompileCache
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.replica_check import ReplicaCheck
from azureml_strategy.strategies.replica_check.data_check import DataCheck
from azureml_strategy.tracking.job_tracking import JobThroughput, JobTracking
from azureml_strategy.tracking.network import NetworkRecorder

NODE_1 = {
    "AZUREML_RUN_ID": "quirky_plum",
    "AZUREML_NODE_COUNT": "2",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "6105",
    "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db",
}
QUIET: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
OURS = (
    *(LaunchGuard, HangWatch, TerminateTogether, NetworkRecorder, DataCheck, ReplicaCheck),
    *(CompileCache, JobTracking, JobThroughput),
)
TRAINER = "Trainer(strategy='azureml_ddp', accelerator='cpu', logger=False, enable_checkpointing=False)"


def inside(monkeypatch: pytest.MonkeyPatch, **changed: str) -> None:
    for name, value in (NODE_1 | changed).items():
        monkeypatch.setenv(name, value)


def python(code: str) -> str:
    """What the code prints in an interpreter of its own; it must succeed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ours(trainer: Trainer) -> list[type]:
    return [type(callback) for callback in trainer.callbacks if isinstance(callback, OURS)]


def test_lightning_finds_the_callbacks_by_their_entry_point() -> None:
    (found,) = entry_points(group="lightning.pytorch.callbacks_factory", name="azureml_strategy")
    assert found.load() is job_callbacks


def test_lightning_and_torch_find_the_other_entry_points() -> None:
    groups = {
        "lightning.fabric.callbacks_factory": fabric_callbacks,
        "torch.backends": register_when_lightning_is_imported,
    }
    for group, function in groups.items():
        (found,) = entry_points(group=group, name="azureml_strategy")
        assert found.load() is function


def test_a_trainer_outside_a_job_has_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lightning.pytorch.cli", raising=False)  # beside which comes one
    assert job_callbacks() == []
    assert ours(Trainer(**QUIET)) == []


def test_every_trainer_of_a_job_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    inside(monkeypatch)
    trainers = [Trainer(**QUIET), Trainer(**QUIET)]
    assert [ours(trainer) for trainer in trainers] == [list(OURS)] * 2
    assert trainers[0].callbacks[-1] is not trainers[1].callbacks[-1]


def test_all_reach_a_process_that_lightning_spawns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of `ddp_spawn` sends it the Trainer by pickle."""
    inside(monkeypatch)
    assert ours(pickle.loads(pickle.dumps(Trainer(**QUIET)))) == list(OURS)


def test_a_job_of_one_node_without_a_launcher_has_what_any_job_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZUREML_RUN_ID", "quirky_plum")
    monkeypatch.setenv("AZUREML_NODE_COUNT", "1")
    assert ours(Trainer(**QUIET)) == [CompileCache]


def test_a_job_of_one_process_has_those_that_track(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZUREML_RUN_ID", "quirky_plum")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    assert ours(Trainer(**QUIET)) == [CompileCache, JobTracking, JobThroughput]


SWITCHES = (
    *(GUARD_SWITCH, HANG_WATCH_SWITCH, TERMINATION_SWITCH, NETWORK_RECORD_SWITCH, DATA_CHECK_SWITCH),
    *(REPLICA_CHECK_SWITCH, COMPILE_CACHE_SWITCH, TRACKING_SWITCH, THROUGHPUT_SWITCH),
)
SWITCHED = dict(zip(SWITCHES, OURS, strict=True))


@pytest.mark.parametrize("value", ["off", "OFF"])
@pytest.mark.parametrize("switch", SWITCHED)
def test_each_has_a_switch(monkeypatch: pytest.MonkeyPatch, switch: str, value: str) -> None:
    inside(monkeypatch, **{switch: value})
    assert ours(Trainer(**QUIET)) == [each for each in OURS if each is not SWITCHED[switch]]


def test_the_switch_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    inside(monkeypatch, **{CALLBACKS_SWITCH: "off"})
    assert job_callbacks() == []
    monkeypatch.delenv("RANK")
    assert job_callbacks() == [], "nothing is read either"


def test_without_the_guard_a_process_needs_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    inside(monkeypatch, **{GUARD_SWITCH: "off"})
    monkeypatch.delenv("RANK")
    assert job_callbacks() == []


def test_pytorch_lightning_gets_the_guard_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pytorch_lightning")
    assert pytorch_lightning_callbacks() == []
    inside(monkeypatch)
    (guard,) = pytorch_lightning_callbacks()
    assert isinstance(guard, LaunchGuard)
    for switch in (GUARD_SWITCH, CALLBACKS_SWITCH):
        inside(monkeypatch, **{switch: "off"})
        assert pytorch_lightning_callbacks() == []
        monkeypatch.delenv(switch)


def test_one_that_cannot_be_imported_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inside(monkeypatch)
    monkeypatch.setitem(sys.modules, "azureml_strategy.tracking.network", None)
    assert ours(Trainer(**QUIET)) == [each for each in OURS if each is not NetworkRecorder]
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert f"{NETWORK_RECORD_SWITCH}=off" in warning
    assert "Traceback" in warning


def test_a_process_without_a_rank_gets_no_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    inside(monkeypatch)
    monkeypatch.delenv("RANK")
    with pytest.raises(LaunchError, match="RANK is not set"):
        Trainer(**QUIET)


def test_names_are_lower_case_as_lightning_looks_them_up() -> None:
    assert {"azureml_ddp", "azureml_ddp_find_unused_parameters_true"} <= _STRATEGIES.keys()
    assert all(name == name.lower() for name in _STRATEGIES)


@pytest.mark.parametrize(
    "imports",
    [
        pytest.param(
            "import azureml_strategy\nfrom lightning.pytorch import Trainer",
            id="ours first",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "from lightning.pytorch import Trainer\nimport azureml_strategy",
            id="Lightning first",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "import lightning\nimport azureml_strategy\nTrainer = lightning.Trainer",
            id="its whole package",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "from azureml_strategy import AzureMLDDPStrategy\nfrom lightning.pytorch import Trainer",
            id="our class, which imports Lightning",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_names_are_registered_in_either_order(imports: str) -> None:
    """Whoever registers them, torch or the import; `test_torchs_own_switch_leaves_it_out` tries the import alone."""
    code = f"{imports}\nprint(type({TRAINER}.strategy).__name__)"
    assert python(code).splitlines()[-1] == "AzureMLDDPStrategy"


def test_the_arguments_of_a_name_reach_the_strategy() -> None:
    trainer = Trainer(strategy="azureml_ddp_find_unused_parameters_true", **QUIET)
    assert trainer.strategy._ddp_kwargs["find_unused_parameters"] is True


REPLACED = ("ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false")


@pytest.mark.parametrize("name", REPLACED)
def test_lightnings_names_for_ddp_give_ours_in_a_job(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    outside = Trainer(strategy=name, **QUIET).strategy
    inside(monkeypatch)
    in_job = Trainer(strategy=name, **QUIET).strategy
    monkeypatch.setenv(LAUNCH_SWITCH, "off")
    switched = Trainer(strategy=name, **QUIET).strategy
    assert [type(each) for each in (outside, in_job, switched)] == [DDPStrategy, AzureMLDDPStrategy, DDPStrategy]
    assert isinstance(in_job, DDPStrategy)
    assert in_job._ddp_kwargs == {**outside._ddp_kwargs, "gradient_as_bucket_view": False}
    assert (in_job.num_nodes, in_job.world_size, in_job.global_rank) == (2, 2, 1)


def test_others_keep_their_meaning_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    inside(monkeypatch)
    for name in ("ddp_spawn", "ddp_fork", "ddp_notebook"):
        assert type(StrategyRegistry.get(name)) is DDPStrategy
    assert type(Trainer(strategy=DDPStrategy(), **QUIET).strategy) is DDPStrategy
    assert type(Trainer(**QUIET).strategy) is SingleDeviceStrategy


def test_an_environment_of_the_scripts_own_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(LightningEnvironment):
        def node_rank(self) -> int:
            return 4

    inside(monkeypatch)
    own = Trainer(strategy="ddp", plugins=[Own()], num_nodes=5, **QUIET)
    assert (own.num_nodes, own.node_rank, own.world_size) == (5, 4, 5)
    lightnings = Trainer(strategy="ddp", plugins=[LightningEnvironment()], **QUIET)
    assert (lightnings.num_nodes, lightnings.node_rank, lightnings.world_size) == (2, 1, 2)


def test_without_rank_and_guard_ddp_is_lightnings(monkeypatch: pytest.MonkeyPatch) -> None:
    inside(monkeypatch, **{GUARD_SWITCH: "off"})
    monkeypatch.delenv("RANK")
    assert type(Trainer(strategy="ddp", **QUIET).strategy) is DDPStrategy


AUTOLOAD = (
    "import sys, torch\n"
    "assert not {'lightning', 'azureml_strategy.cluster.launchers'} & set(sys.modules)\n"
    "from lightning.pytorch import Trainer\nfrom lightning.fabric import Fabric\n"
    "print(*(type(make(strategy='ddp', accelerator='cpu').strategy).__name__ for make in (Trainer, Fabric)))"
)


def test_import_torch_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    inside(monkeypatch)
    assert python(AUTOLOAD).split()[-2:] == ["AzureMLDDPStrategy", "FabricDDPStrategy"]


def test_torchs_own_switch_leaves_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is imported, here after Lightning."""
    inside(monkeypatch, TORCH_DEVICE_BACKEND_AUTOLOAD="0", **{CALLBACKS_SWITCH: "off"})
    imported = f"{AUTOLOAD}\nimport azureml_strategy\nprint(type({TRAINER}.strategy).__name__)"
    assert python(imported).split()[-3:] == ["DDPStrategy", "DDPStrategy", "AzureMLDDPStrategy"]


@pytest.mark.parametrize("name", sorted(_STRATEGIES))
def test_fabric_has_the_names_too(name: str) -> None:
    if name in ("azureml_deepspeed_pipeline", "azureml_local_sgd", "azureml_diloco"):
        with pytest.raises(NotImplementedError, match=r"Fabric has none.*azureml_model_parallel"):
            Fabric(strategy=name, accelerator="cpu")
    elif "notebook" in name:
        with pytest.raises(ConfigurationError, match=r"write Fabric\(strategy='ddp_notebook'\)"):
            Fabric(strategy=name, accelerator="cpu")
    else:
        assert (
            type(Fabric(strategy=name, accelerator="cpu").strategy).__module__ == "azureml_strategy.strategies.fabric"
        )


def test_importing_it_and_detecting_a_launch_is_light() -> None:
    heavy = ["torch", "lightning", "numpy", "mlflow", "hydra", "azure", "deepspeed"]
    code = (
        "import sys\nfrom azureml_strategy import detect_launch, read_job\n"
        "import azureml_strategy.cluster.emulated, azureml_strategy.cluster.redaction\ndetect_launch(), read_job()\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    assert python(code).strip() == "[]"
