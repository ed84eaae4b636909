"""A user's DeepSpeed configuration, made to agree with the Trainer before training starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from azureml_strategy.strategies.errors import ConfigurationError

_AUTO = "auto"
_HALVES = {"bf16": "bf16-", "fp16": "16-"}


@dataclass(frozen=True)
class TrainerNumbers:
    """What the Trainer and its data loader say about a step.

    Args:
        accumulate_grad_batches: batches to an optimizer step.
        gradient_clip_val: norm to clip to, or None.
        precision: as in `Trainer(precision=...)`.
        batch_size: samples in a batch of one process; None where the loader does not say.
        data_parallel_size: processes that read different samples.
        logged_batch_size: samples that DeepSpeed's log is to count to a batch of one process, whatever the loader
            says; None for those of the loader.
    """

    accumulate_grad_batches: int
    gradient_clip_val: float | None
    precision: str
    batch_size: int | None
    data_parallel_size: int
    logged_batch_size: int | None = None


def agree(config: Mapping[str, Any], trainer: TrainerNumbers) -> dict[str, Any]:
    """The configuration with the Trainer's numbers where it says "auto" or nothing.

    A number that equals the Trainer's is taken. `gradient_clipping` is also taken where the Trainer has none. What is
    left out here, Lightning adds from the Trainer.

    Args:
        config: as DeepSpeed documents it (https://www.deepspeed.ai/docs/config-json).
        trainer: what it has to agree with.

    Returns:
        A copy, without `gradient_accumulation_steps`, which Lightning sets itself.

    Raises:
        ConfigurationError: a number contradicts the Trainer's, or "auto" stands where nobody knows the value.
    """
    agreed = deepcopy(dict(config))
    _agree_on_numbers(agreed, trainer)
    _agree_on_precision(agreed, trainer.precision)
    _refuse_unknown(agreed)
    # Lightning's default: DeepSpeed would refuse every optimizer but its own.
    agreed.setdefault("zero_allow_untested_optimizer", True)
    return agreed


def _agree_on_numbers(config: dict[str, Any], trainer: TrainerNumbers) -> None:
    accumulate, clip = trainer.accumulate_grad_batches, trainer.gradient_clip_val
    _take(config, "gradient_accumulation_steps", accumulate, f"Trainer(accumulate_grad_batches={accumulate})")
    if trainer.batch_size is None:
        config.pop("train_batch_size", None)  # only DeepSpeed's own log reads it
    else:
        _agree_on_batch(config, trainer.batch_size, accumulate, trainer.data_parallel_size)
    if trainer.logged_batch_size is not None:
        config["train_micro_batch_size_per_gpu"] = trainer.logged_batch_size
    elif config.get("train_micro_batch_size_per_gpu", _AUTO) == _AUTO:
        config["train_micro_batch_size_per_gpu"] = trainer.batch_size or 1
    if clip is not None or config.get("gradient_clipping") == _AUTO:
        _take(config, "gradient_clipping", clip, f"Trainer(gradient_clip_val={clip})")


def _agree_on_batch(config: dict[str, Any], batch: int, accumulate: int, replicas: int) -> None:
    _take(config, "train_micro_batch_size_per_gpu", batch, f"a data loader with batch_size={batch}")
    whole = f"{batch} samples a batch x {accumulate} batches a step x {replicas} data-parallel process(es)"
    _take(config, "train_batch_size", batch * accumulate * replicas, whole)


def _take(config: dict[str, Any], key: str, value: float | None, said_by: str) -> None:
    """Drop a key that says what Lightning will set anyway."""
    found = config.pop(key, _AUTO)
    if found not in (_AUTO, value):
        raise ConfigurationError(
            f"The DeepSpeed configuration says {key}={found!r}, but {value} comes from {said_by}. Leave {key} out of "
            "the configuration, write 'auto', or let the two agree."
        )


def _agree_on_precision(config: dict[str, Any], precision: str) -> None:
    for name, start in _HALVES.items():
        section = config.get(name)
        if section is None:
            continue
        wanted, enabled = precision.startswith(start), section.get("enabled", False)
        if enabled not in (_AUTO, wanted):
            remedy = f"precision='{start}mixed'" if enabled else "precision='32-true'"
            raise ConfigurationError(
                f"The DeepSpeed configuration says {name}.enabled={enabled}, but the Trainer has precision="
                f"{precision!r}. Write Trainer({remedy}), or {name}: {{enabled: 'auto'}} in the configuration."
            )
        section["enabled"] = wanted


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    """DeepSpeed has defaults for all its own numbers, but not for those of optimizers and schedules."""
    for section in ("optimizer", "scheduler"):
        for key in _autos(config.get(section, {}), section):
            raise ConfigurationError(
                f"The DeepSpeed configuration says {key}='auto', but only your script knows it. Write the number, or "
                f"leave {section!r} out and return it from LightningModule.configure_optimizers."
            )


def _autos(value: Any, key: str) -> Iterator[str]:
    if value == _AUTO:
        yield key
    elif isinstance(value, Mapping):
        for name, child in value.items():
            yield from _autos(child, f"{key}.{name}")
