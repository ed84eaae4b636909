"""A pipeline's folder: the weights of each layer lie in a file of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from azureml_strategy.checkpoint.formats.format import CheckpointFormat, CheckpointFormatError
from azureml_strategy.checkpoint.formats.pickles import read_file, reading_deepspeed

# Written by PipelineStrategy beside the folder with DeepSpeed's files.
_LAYOUT, _SHARDS = "pipeline.json", "checkpoint"


def consolidate_pipeline(folder: Path, trust_pickles: bool = False) -> dict[str, Tensor]:
    """The weights of all stages, under the names that they have in the module that was not cut.

    Args:
        folder: the checkpoint, as the Trainer wrote it.
        trust_pickles: run whatever code its files ask for.

    Returns:
        What the module's `load_state_dict` takes, on the CPU, in the dtype of training; tied parameters under each of
        their names.

    Raises:
        CheckpointFormatError: the file of a layer is missing, or reading it would run code.
    """
    weights: dict[str, Tensor] = {}
    for index, place in enumerate(json.loads((folder / _LAYOUT).read_text())["places"]):
        if place is not None:
            weights |= {f"{place}.{name}": value for name, value in _layer(folder, index, trust_pickles).items()}
    return weights


def _layer(folder: Path, index: int, trust_pickles: bool) -> dict[str, Tensor]:
    file = folder / _SHARDS / f"layer_{index:02d}-model_states.pt"
    if not file.is_file():
        raise CheckpointFormatError(
            f"{folder} lacks {file.relative_to(folder)}: was it copied from one node of several, or while it was being "
            "written? Give a folder that all nodes wrote to."
        )
    layer: dict[str, Tensor] = read_file(file, trust_pickles)
    return layer


def _found(path: Path) -> bool:
    return (path / _LAYOUT).is_file()


def _read(path: Path, trust_pickles: bool) -> dict[str, Any]:
    # Lightning's own entries, the same on all ranks; the pickled tensors of this file stay on disk.
    first = path / _SHARDS / "mp_rank_00_model_states.pt"
    with reading_deepspeed([first], trust_pickles):
        saved = read_file(first, trust_pickles)
    return {**saved, "state_dict": consolidate_pipeline(path, trust_pickles)}


PIPELINE = CheckpointFormat("DeepSpeed pipeline stages", _found, _read)
