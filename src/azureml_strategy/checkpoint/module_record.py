"""What a checkpoint records of its module: class, configuration and input, so that it can be made again to predict.

A state dict alone does not say which class it belongs to. The entry `MODULE` does, in values that torch's weights-only
unpickler takes: names and numbers, no objects.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from azureml_strategy.checkpoint.formats import CheckpointFormatError

MODULE = "azureml_strategy_module"
"""The entry of a checkpoint about its module: `class`, and where they are known `config` and `input`."""
CLASS, CONFIG, INPUT = "class", "config", "input"
"""A dotted path; a mapping with `_target_`, as in a recipe; `{"shape": sizes of one sample, "dtype": name}`."""
# The most numbers of a sample, our choice: an export and an endpoint make a sample of zeros.
_LARGEST_SAMPLE = 2**28
# These are attributes of the module object, so that they are wherever it is.
_CONFIG, _INPUT = "_azureml_strategy_config", "_azureml_strategy_input"


def remember_config(module: LightningModule, config: Mapping[str, Any]) -> None:
    """Keep the configuration that a module was made from, for its checkpoints.

    It has a `_target_`, is resolved, and is made of plain values without secrets.
    """
    setattr(module, _CONFIG, dict(config))


def remember_input(module: LightningModule, batch: Any) -> None:
    """Keep the sizes and the type of the samples that a module is trained on, for its checkpoints.

    A size that differs between two batches, such as the length of texts, becomes None: the model takes any size there.
    A batch is a tensor whose first dimension counts the samples, or a list or tuple that begins with one. Other batches
    are passed over.
    """
    first = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
    if not isinstance(first, Tensor) or first.dim() == 0:
        return
    sizes: tuple[int | None, ...] = tuple(first.shape[1:])
    # The precision of the training has cast this batch. A module that is made again gets the data as they are.
    dtype = torch.float32 if first.dtype.is_floating_point else first.dtype
    known = getattr(module, _INPUT, None)
    if known == (sizes, dtype):
        return
    if known is not None and len(known[0]) == len(sizes):
        sizes = tuple(old if old == new else None for old, new in zip(known[0], sizes, strict=True))
    setattr(module, _INPUT, (sizes, dtype))


def module_entry(module: LightningModule | None) -> dict[str, Any]:
    """The entry of a checkpoint about its module; empty without a module."""
    if module is None:
        return {}
    record: dict[str, Any] = {CLASS: class_path(type(module))}
    config = getattr(module, _CONFIG, None)
    if config is not None:
        record[CONFIG] = config
    known = getattr(module, _INPUT, None)
    if known is None and isinstance(example := module.example_input_array, Tensor) and example.dim():
        known = tuple(example.shape[1:]), example.dtype
    if known is not None:
        record[INPUT] = {"shape": list(known[0]), "dtype": str(known[1]).removeprefix("torch.")}
    return {MODULE: record}


def class_path(kind: type) -> str:
    """The dotted path by which another process imports a class.

    A class that torch has derived to shard a module is replaced by its base class. A class of the script that runs has
    the script's name in place of `__main__`.
    """
    own = next(each for each in kind.__mro__ if not each.__module__.startswith("torch."))
    module, main = own.__module__, sys.modules["__main__"]
    if module == "__main__" and getattr(main, "__spec__", None) is not None:
        module = str(main.__spec__.name)  # type: ignore[union-attr]
    elif module == "__main__" and getattr(main, "__file__", None):
        module = Path(str(main.__file__)).stem
    return f"{module}.{own.__qualname__}"


def read_input(record: Mapping[str, Any]) -> tuple[tuple[int | None, ...], torch.dtype]:
    """Read the part `INPUT` of an entry: the sizes of one sample, and the type of its numbers.

    Raises:
        CheckpointFormatError: it holds something else, or the sample is too large.
    """
    sizes, dtype = record.get("shape"), getattr(torch, str(record.get("dtype")), None)
    listed: list[Any] = list(sizes) if isinstance(sizes, list | tuple) else [""]
    odd = any(each is not None and (type(each) is not int or each < 0) for each in listed)
    if odd or not isinstance(dtype, torch.dtype):
        raise CheckpointFormatError(
            f"The file tells of an input {dict(record)!r:.200}, which is no shape and type of numbers. Name it by "
            "--input-shape and --input-dtype."
        )
    if math.prod(each or 1 for each in listed) > _LARGEST_SAMPLE:
        raise CheckpointFormatError(
            f"The file tells of samples of {listed}, of more than {_LARGEST_SAMPLE:,} numbers. Name their shape "
            "by --input-shape."
        )
    return tuple(listed), dtype


def recorded_class(file: Path) -> str | None:
    """The user's class that a consolidated file needs, or else its module's class; None if none is recorded."""
    record = torch.load(file, map_location="cpu", mmap=True, weights_only=True).get(MODULE)
    if record is None:
        return None
    named = list(_targets(record[CONFIG])) if CONFIG in record else [str(record[CLASS])]
    return next((each for each in named if not each.startswith("azureml_strategy.")), named[0])


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from [node["_target_"]] if "_target_" in node else []
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _targets(each)


def module_overrides(
    class_name: str | None = None, sizes: tuple[int, ...] | None = None, dtype: str | None = None
) -> dict[str, Any]:
    """An entry with what a user states about a module, in place of what its checkpoint records.

    Args:
        class_name: dotted path of its class. It replaces a recorded class or configuration.
        sizes: of one sample, without the dimension that counts samples.
        dtype: of the input's numbers, such as `uint8`. None is float32.
    """
    overrides: dict[str, Any] = {} if class_name is None else {CLASS: class_name}
    if sizes is not None:
        overrides[INPUT] = {"shape": list(sizes), "dtype": dtype or "float32"}
    return overrides


def merged(recorded: Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with a user's overrides in place of what is recorded. A class replaces a recorded configuration."""
    kept = {name: value for name, value in (recorded or {}).items() if name != CONFIG or CLASS not in overrides}
    return {**kept, **overrides}
