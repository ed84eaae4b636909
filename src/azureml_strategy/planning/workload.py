"""Reads from a recipe what the planner must know: network, batch, precision, strategy, and how much is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.networks import Network, network_of_module
from azureml_strategy.training.checks import compose_recipe
from azureml_strategy.training.recipes import RecipeError, find_recipe
from azureml_strategy.training.resolvers import register_resolvers
from azureml_strategy.training.targets import make, own_modules

_BY_GPU = "by the GPU"
_EPOCH = 1_281_167  # images that ImageNet-1k has for training (Russakovsky et al. 2015)


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
        steps: optimizer steps of the whole run, where steps end it.
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
    module: LightningModule
    make_batch: Callable[[int], Any]


def read_workload(recipe: str, overrides: Sequence[str]) -> Workload:
    """Read a recipe as a machine with GPUs resolves it. Neither its data nor a GPU is needed.

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
                return _workload(recipe, overrides, config, hydra)
    except RecipeError as error:
        raise PlanError(str(error)) from error
    except OmegaConfBaseException as error:
        raise PlanError(f"The recipe cannot be resolved: {str(error).splitlines()[0]}") from error


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
    trainer, strategy = config.trainer, dict(config.strategy)
    batch, tokens = _batch(config, batch_size)
    module = _module(config)
    name = f"{type(module).__name__} on {tokens} tokens" if tokens else type(module).__name__
    network = network_of_module(module, batch, batch_size, name)
    unit = OmegaConf.select(config, "tracking.throughput.unit") or "samples"
    accumulate = int(trainer.get("accumulate_grad_batches") or 1)
    steps = int(trainer.max_steps) if (trainer.get("max_steps") or -1) > 0 else None
    return Workload(
        recipe=recipe,
        overrides=tuple(overrides),
        network=network,
        batch_size=batch_size,
        precision=None if str(trainer.precision) == _BY_GPU else _precision(trainer.precision),
        compiled=_compiles(config, "strategy.compile", "model.compile"),
        ddp_compiled=_compiles(config, "compile", "model.compile"),
        tf32=config.get("matmul_precision") in ("high", "medium"),
        strategy=str(hydra.runtime.choices.get("strategy") or "ddp"),
        settings=strategy,
        accumulate=accumulate,
        optimizer="sgd" if "ImageClassifier" in str(config.model._target_) else "adam",
        unit=unit,
        per_sample=tokens if unit == "tokens" and tokens else 1,
        samples=_samples(config),
        steps=steps,
        module=module,
        make_batch=lambda size: _batch(config, size)[0],
    )


def _precision(given: Any) -> str:
    names = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
    return names.get(str(given), str(given))


def _compiles(config: DictConfig, *keys: str) -> bool:
    return any(OmegaConf.select(config, key) not in (None, False, "off") for key in keys)


def _samples(config: DictConfig) -> float | None:
    """Samples of the whole run as far as epochs and the data module's settings tell; None if they do not."""
    epochs = config.trainer.get("max_epochs")
    target = str(config.data._target_)
    if (config.trainer.get("max_steps") or -1) > 0 or not epochs or epochs < 0:
        return None
    if "Image" in target and OmegaConf.select(config, "num_classes") == 1000:
        return float(epochs * _EPOCH)
    return None


def _module(config: DictConfig) -> LightningModule:
    """The recipe's module on the meta device, with its layers."""
    with torch.device("meta"):
        module = make("model", config.model)
        if not isinstance(module, LightningModule):
            raise PlanError(f"model makes a {type(module).__name__}, which is no LightningModule.")
        try:
            module.configure_model()
        except Exception as error:  # what a user's module does here is its own
            raise PlanError(
                f"{type(module).__name__} cannot be built without its weights ({type(error).__name__}: {error})."
            ) from error
    return module


def _batch(config: DictConfig, size: int) -> tuple[Any, int]:
    """A batch on the meta device with the shapes that the recipe says, and the tokens of each of its samples."""
    data = config.data
    with torch.device("meta"):
        labels = torch.zeros(size, dtype=torch.int64)
        if data.get("image_size"):
            return (torch.zeros(size, 3, data.image_size, data.image_size), labels), 0
        if data.get("sequence_length"):
            length = int(data.sequence_length)
            tokens = torch.zeros(size, length, dtype=torch.int64)
            if "Chat" in str(data._target_):
                return {"input_ids": tokens, "attention_mask": tokens, "shift_labels": tokens}, length
            return (tokens, tokens), length
    raise PlanError(
        f"The shapes of a batch of {data._target_} are not known: it has neither data.image_size nor "
        "data.sequence_length. Describe the network in Python: azureml_strategy.planning.network_of_module."
    )
