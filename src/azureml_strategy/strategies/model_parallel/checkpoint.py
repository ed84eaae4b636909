"""Refuses a checkpoint that does not fit, before torch fails in the middle of reading it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader  # type: ignore[attr-defined]
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from azureml_strategy.strategies.errors import ConfigurationError, UnfitCheckpointError

# What torch's distributed checkpoint writes last, and what Lightning writes after it.
_INDEX, _REST = ".metadata", "meta.pt"
_SHOWN = 3
_LAYOUTS = (
    "azureml_model_parallel reads the folders that it writes, and single files of it or of DDP. Weights of another "
    "layout can be made one file by `azureml-strategy consolidate CHECKPOINT OUTPUT`."
)


def check_checkpoint(path: Path, weights: Mapping[str, torch.Size], strict: bool) -> None:
    """Check a checkpoint before it is loaded; of a single file only that it exists.

    Args:
        path: the folder or file.
        weights: shape of each entry of the module's state dict, unsharded.
        strict: whether the checkpoint must hold all of them.

    Raises:
        UnfitCheckpointError: there is none.
        ConfigurationError: a folder of another layout, an incomplete one, or one of another model.
    """
    if not path.exists():
        raise UnfitCheckpointError(f"There is no checkpoint at {path}.")
    if path.is_dir():
        _check_complete(path)
        _check_weights(path, weights, strict)


def _check_complete(folder: Path) -> None:
    missing = [name for name in (_INDEX, _REST) if not (folder / name).is_file()]
    if len(missing) == 1:
        raise ConfigurationError(f"The checkpoint {folder} is incomplete: {missing[0]} is missing. Use an earlier one.")
    if missing:
        found = sorted(file.name for file in folder.iterdir())[:_SHOWN]
        raise ConfigurationError(
            f"{folder} is no distributed checkpoint: it holds {', '.join(found) or 'nothing'}, but no {_INDEX}. "
            f"{_LAYOUTS}"
        )


def _check_weights(folder: Path, weights: Mapping[str, torch.Size], strict: bool) -> None:
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    saved = {
        name.removeprefix("state_dict."): entry.size
        for name, entry in entries.items()
        if name.startswith("state_dict.") and isinstance(entry, TensorStorageMetadata)
    }
    missing = [name for name in weights if name not in saved]
    if missing and strict:
        raise ConfigurationError(
            f"The checkpoint {folder} has no {', '.join(missing[:_SHOWN])} ({len(missing)} of {len(weights)} weights "
            f"of this model are missing). Resume the model that it was written by. {_LAYOUTS}"
        )
    for name, shape in weights.items():
        if name in saved and saved[name] != shape:
            raise ConfigurationError(
                f"{name} is {tuple(shape)}, but {tuple(saved[name])} in the checkpoint {folder}. Resume with the sizes "
                "of the model that it was written by."
            )
