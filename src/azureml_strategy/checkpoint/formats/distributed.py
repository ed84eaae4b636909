"""The folder of `torch.distributed.checkpoint`, as Lightning's FSDP and ModelParallel strategies write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from azureml_strategy.checkpoint.formats.format import CheckpointFormat, CheckpointFormatError
from azureml_strategy.checkpoint.formats.pickles import IndexReader, read_file

# What Lightning writes beside the shards.
_REST = "meta.pt"
# What FSDPStrategy and ModelParallelStrategy call the weights.
_ROOTS = ("model", "state_dict")


def _found(path: Path) -> bool:
    return (path / ".metadata").is_file()


def _read(path: Path, trust_pickles: bool) -> dict[str, Any]:
    import torch
    from torch.distributed.checkpoint import CheckpointException, load  # type: ignore[attr-defined]
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = IndexReader(path, trust_pickles)
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        root, _, inner = name.partition(".")
        if root in _ROOTS and isinstance(entry, TensorStorageMetadata):
            weights.setdefault(root, {})[inner] = torch.empty(entry.size, dtype=entry.properties.dtype)
    try:
        load(weights, storage_reader=reader)  # only what is named, so the optimizer's two thirds stay on disk
    except CheckpointException as error:  # which holds the errors of all ranks, with their stacks
        reason = str(next(iter(error.failures.values()))[0])
        if "Weights only load failed" in reason:  # and advice that does not apply here
            reason = reason.partition("\n\n")[2].strip().partition("\n")[0]
        raise CheckpointFormatError(f"{path}: a part cannot be read, and no part may be left out: {reason}") from error
    beside = path / _REST
    rest: dict[str, Any] = read_file(beside, trust_pickles) if beside.is_file() else {}
    return {**rest, "state_dict": {name: tensor for each in weights.values() for name, tensor in each.items()}}


DISTRIBUTED = CheckpointFormat("torch.distributed.checkpoint shards", _found, _read)
