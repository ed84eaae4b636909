"""Reads from a recipe what the planner must know: network, batch, precision, strategy, and how much is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from azureml_strategy.huggingface.loading import Loading, loading_as
from azureml_strategy.huggingface.sources import PretrainedModelError
from azureml_strategy.models import FineTuner
from azureml_strategy.planning.batches import Shape, shape_of
from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.networks import Network, network_of_module
from azureml_strategy.planning.optimizer_kind import optimizer_kind
from azureml_strategy.planning.run_length import run_length
from azureml_strategy.planning.uncounted import uncounted_settings
from azureml_strategy.training.checks import compose_recipe, target_nodes
from azureml_strategy.training.recipes import RecipeError, find_recipe
from azureml_strategy.training.resolvers import register_resolvers
from azureml_strategy.training.targets import make, own_modules

_BY_GPU = "by the GPU"
# Where our classes lie that a planner makes, or whose kind it looks up.
_OWN = {"model": "azureml_strategy.models.", "data": "azureml_strategy.data."}
_WITH_WEIGHTS = "FineTuner"
_TRACED = 8  # samples of the batch that is followed; `predict` scales it, and time does not grow with the batch
_WHY_NOT = "code that is not of this package does not run, and no weights are read. `azureml-strategy plan` does both."


@dataclass(frozen=True, eq=False)
class Workload:
    """One run of a recipe, wherever it runs.

    Attributes:
        recipe: its name or file.
        overrides: the user's changes.
        network: what a step computes.
        batch_size: samples of a step and process.
        precision: Lightning's name; None for the fastest of each GPU.
        compiled: whether the recipe compiles on a GPU.
        ddp_compiled: whether it would under DDP.
        tf32: whether products of float32 matrices may be taken in TF32.
        strategy: the recipe's own, as a name of conf/strategy.
        settings: keys of the `strategy` section.
        accumulate: batches of an optimizer step.
        optimizer: `sgd` or `adam`.
        unit: what is counted, such as images or tokens.
        per_sample: units of a sample.
        samples: that the whole run trains on; None if the recipe does not say it.
        steps: optimizer steps of the whole run; None if none end it. What comes first counts.
        gpus_per_node: GPUs of each node that it uses; None for all.
        pinned: keys of the Trainer that say nodes or GPUs, which must agree with where it runs.
        uncounted: settings that change the run and are not in the plan, as `KEY=VALUE`.
        data_note: what was assumed of its samples, in a sentence; or empty.
        optimizer_note: the same of its optimizer.
        module: on the meta device, for its memory.
        make_batch: a batch of so many samples on the meta device.
    """

    recipe: str
    overrides: tuple[str, ...]
    network: Network
    batch_size: int
    precision: str | None
    compiled: bool
    ddp_compiled: bool
    tf32: bool
    strategy: str
    settings: Mapping[str, Any]
    accumulate: int
    optimizer: str
    unit: str
    per_sample: int
    samples: float | None
    steps: int | None
    gpus_per_node: int | None
    pinned: tuple[str, ...]
    uncounted: tuple[str, ...]
    data_note: str
    optimizer_note: str
    module: LightningModule
    make_batch: Callable[[int], Any]


def read_workload(recipe: str, overrides: Sequence[str], *, only_ours: bool = False) -> Workload:
    """Read a recipe as a machine with GPUs resolves it. Neither its data nor a GPU is needed.

    Args:
        recipe: name of a shipped recipe, or path of a YAML file.
        overrides: overrides of one run.
        only_ours: refuse a recipe that names other classes for its model or data than those of this package, before
            any of them is imported, and one that starts from weights.

    Raises:
        PlanError: the recipe or an override is misspelt, or what it trains cannot be known from here.
    """
    try:
        found = find_recipe(recipe)
        with own_modules(found.folder):
            register_resolvers()
            config = compose_recipe(found, list(overrides))
            with open_dict(config):
                hydra = config.pop("hydra")
                config.output_dir = ""
            with _as_on_a_gpu():
                if only_ours:
                    _refuse_foreign(config)
                return _workload(recipe, overrides, config, hydra)
    except RecipeError as error:
        raise PlanError(str(error)) from error
    except OmegaConfBaseException as error:
        raise PlanError(f"The recipe cannot be resolved: {str(error).splitlines()[0]}") from error


def _refuse_foreign(config: DictConfig) -> None:
    """Refuse classes that are not ours, as they are when all is filled in: a text may be put together of others."""
    for section, own in _OWN.items():
        content = OmegaConf.to_container(config[section], resolve=True)
        for place, node in target_nodes(content, section):
            target = str(node["_target_"])
            if not target.startswith(own) or target.endswith(_WITH_WEIGHTS):
                raise PlanError(f"{place} is a {target}, which is not made here: {_WHY_NOT}")


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Resolve what a recipe makes depend on the device as a GPU would."""
    OmegaConf.register_new_resolver("azureml.by_device", lambda on_cpu, on_gpu: on_gpu, replace=True)
    OmegaConf.register_new_resolver("azureml.precision", lambda *_: _BY_GPU, replace=True)
    try:
        yield
    finally:
        register_resolvers()


def _workload(recipe: str, overrides: Sequence[str], config: DictConfig, hydra: DictConfig) -> Workload:
    batch_size = OmegaConf.select(config, "data.batch_size")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise PlanError(f"data.batch_size is {batch_size!r}. Give the samples of a step and process, such as 32.")
    traced = min(batch_size, _TRACED)
    trainer, shape = config.trainer, _shape(config)
    module = _module(config)
    make_batch = partial(_batch, module, shape)
    name = f"{type(module).__name__} on {shape.tokens} tokens" if shape.tokens else type(module).__name__
    unit = OmegaConf.select(config, "tracking.throughput.unit") or "samples"
    length = run_length(config)
    optimizer, assumed = optimizer_kind(module)
    return Workload(
        recipe=recipe,
        overrides=tuple(overrides),
        network=network_of_module(module, make_batch(traced), traced, name),
        batch_size=batch_size,
        precision=None if str(trainer.precision) == _BY_GPU else _precision(trainer.precision),
        compiled=_compiles(config, "strategy.compile", "model.compile"),
        ddp_compiled=_compiles(config, "compile", "model.compile"),
        tf32=config.get("matmul_precision") in ("high", "medium"),
        strategy=str(hydra.runtime.choices.get("strategy") or "ddp"),
        settings=dict(config.strategy),
        accumulate=int(trainer.get("accumulate_grad_batches") or 1),
        optimizer=optimizer,
        unit=unit,
        per_sample=shape.tokens if unit == "tokens" and shape.tokens else 1,
        samples=length.samples,
        steps=length.steps,
        gpus_per_node=OmegaConf.select(config, "cluster.processes_per_node") or _devices(trainer.get("devices")),
        pinned=_pinned(trainer),
        uncounted=uncounted_settings(config),
        data_note=length.note,
        optimizer_note=assumed,
        module=module,
        make_batch=make_batch,
    )


def _batch(module: LightningModule, shape: Shape, samples: int) -> Any:
    """A batch as the module's step gets it, on the meta device."""
    try:
        batch = module.on_after_batch_transfer(module.on_before_batch_transfer(shape.batch(samples), 0), 0)
    except Exception as error:  # what a user's module does here is its own
        raise PlanError(
            f"{type(module).__name__} cannot take a batch without numbers ({type(error).__name__}: {error})."
        ) from error
    if isinstance(module, FineTuner):
        # transformers reads the values of a mask of padding, and of positions where there is none; not of a whole one.
        mask = torch.ones((1, 1, shape.tokens, shape.tokens), dtype=torch.bool, device="meta")
        return {**batch, "attention_mask": mask}
    return batch


def _devices(given: Any) -> int | None:
    """The GPUs of a node that `trainer.devices` names; None for all."""
    if isinstance(given, (list, ListConfig)):
        return len(given)
    words = [each for each in str(given).split(",") if each.strip()]
    if len(words) > 1:
        return len(words)
    return int(given) if str(given).isdigit() and int(given) > 0 else None


def _pinned(trainer: DictConfig) -> tuple[str, ...]:
    several = trainer.get("num_nodes") not in (None, 1, "auto")
    devices = str(trainer.get("devices")) not in ("None", "auto", "-1")
    return tuple(key for key, is_set in (("trainer.num_nodes", several), ("trainer.devices", devices)) if is_set)


def _precision(given: Any) -> str:
    names = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
    return names.get(str(given), str(given))


def _compiles(config: DictConfig, *keys: str) -> bool:
    return any(OmegaConf.select(config, key) not in (None, False, "off") for key in keys)


def _module(config: DictConfig) -> LightningModule:
    """The recipe's module on the meta device, with its layers."""
    meta = torch.device("meta")
    with meta:
        module = make("model", config.model)
    if not isinstance(module, LightningModule):
        raise PlanError(f"model makes a {type(module).__name__}, which is no LightningModule.")
    # Pretrained weights stay in their files; what no file has, such as adapters, is made, and then let go.
    built = nullcontext() if isinstance(module, FineTuner) else meta
    try:
        with built, loading_as(Loading("in_parts", meta, "32-true")):
            module.configure_model()
    except PretrainedModelError as error:
        raise PlanError(str(error)) from error
    except Exception as error:  # what a user's module does here is its own
        raise PlanError(
            f"{type(module).__name__} cannot be built without its weights ({type(error).__name__}: {error})."
        ) from error
    return module.to("meta")


def _shape(config: DictConfig) -> Shape:
    shape = shape_of(config.data)
    if shape is None:
        raise PlanError(
            f"The shapes of a batch of {config.data._target_} are not known: it has neither data.image_size nor "
            "data.sequence_length. Describe the network in Python: azureml_strategy.planning.network_of_module."
        )
    return shape
