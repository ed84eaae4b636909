"""How long a recipe trains, as far as its configuration tells: on so many samples, or for so many optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from omegaconf import DictConfig

_IMAGENET = 1_281_167  # images that ImageNet-1k has for training (Russakovsky et al. 2015)


@dataclass(frozen=True)
class RunLength:
    """The end of a run, whichever comes first.

    Attributes:
        samples: that the whole run trains on; None if the recipe does not say it.
        steps: optimizer steps after which it ends; None if none end it.
        note: what was assumed, in a sentence; empty if nothing was.
    """

    samples: float | None
    steps: int | None
    note: str = ""


def run_length(config: DictConfig) -> RunLength:
    """Read epochs, steps and limits of the Trainer, and what the data module says of its size.

    Args:
        config: a recipe, resolved as a machine with GPUs does.
    """
    trainer = config.trainer
    given, epochs = trainer.get("max_steps"), trainer.get("max_epochs")
    limits = [trainer.get("overfit_batches") or None, trainer.get("limit_train_batches")]
    limit = next((each for each in limits if each is not None), 1.0)
    most = int(given) if given is not None and given > 0 else None
    if not epochs or epochs < 0:
        return RunLength(None, most)
    batches = [each for each in (limit, config.data.get("steps_per_epoch")) if isinstance(each, int)]
    ends = [most] if most is not None else []
    if batches:
        ends.append(epochs * math.ceil(min(batches) / int(trainer.get("accumulate_grad_batches") or 1)))
    samples = epochs * _IMAGENET * (limit if isinstance(limit, float) else 1.0) if _is_imagenet(config) else None
    note = f"Counted are the {_IMAGENET:,} images of ImageNet-1k; give --samples N for another set."
    return RunLength(samples, min(ends, default=None), note if samples is not None else "")


def _is_imagenet(config: DictConfig) -> bool:
    """Whether 1,000 classes of images are read from no place that has another name."""
    data = config.data
    places = [str(place).lower() for key in ("root", "input_name") if (place := data.get(key)) is not None]
    images = "Image" in str(data.get("_target_")) and config.get("num_classes") == 1000
    return images and all("imagenet" in each for each in places)
