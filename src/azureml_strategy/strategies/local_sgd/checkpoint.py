"""The folder of a checkpoint: one file with the averages, which anyone can load, and what each rank has of its own."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from torch import Tensor

from azureml_strategy.checkpoint.checkpoint_io import AtomicCheckpointIO
from azureml_strategy.checkpoint.formats import AVERAGED
from azureml_strategy.control.gather import Exchange
from azureml_strategy.interfaces import WriteStaged

ENTRY = "azureml_strategy_local_sgd"
"""The entry of both kinds of files with the state of the averaging."""
# How many names an error message lists.
_SHOWN = 3
# Entries of Lightning's checkpoint that are another on each rank.
_OF_RANK = ("optimizer_states", "lr_schedulers")


def cloned(state: dict[str, Any]) -> dict[str, Any]:
    """Copy the tensors of a state dict, so that they do not change with the module.

    Names of one tensor have one copy too: apart, tied weights would be written twice.

    Args:
        state: changed in place.
    """
    copied: dict[int, Any] = {}  # deepcopy copies a memory once for all tensors that share it
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = copy.deepcopy(value.detach(), copied)
    return state


def own_part(checkpoint: dict[str, Any], precision: str) -> dict[str, Any]:
    """Return the entries of a rank's checkpoint that differ between ranks.

    Args:
        checkpoint: as Lightning gives it to `save_checkpoint`.
        precision: the entry of the precision plugin, with its scale of the loss.
    """
    return {name: checkpoint[name] for name in (*_OF_RANK, precision) if name in checkpoint}


def writer(checkpoint_io: CheckpointIO) -> WriteStaged:
    """Return what writes a folder, in steps that all ranks take together.

    What it writes is a pair: the checkpoint with the averages, on rank 0, and what the rank has of its own.

    Args:
        checkpoint_io: writes each file.
    """
    save: Callable[..., Any] = checkpoint_io.save_checkpoint
    if type(checkpoint_io).save_checkpoint is AtomicCheckpointIO.save_checkpoint:
        save = checkpoint_io.write  # type: ignore[attr-defined]

    def write(content: Any, path: Path, exchange: Exchange) -> None:
        def begin_folder() -> None:
            if path.is_file():  # an earlier checkpoint of the same name
                path.unlink()
            for stale in (path / AVERAGED, *path.glob("rank_*.pt")):
                stale.unlink(missing_ok=True)
            path.mkdir(parents=True, exist_ok=True)

        averaged, own = content
        exchange.on_rank_zero(begin_folder)
        exchange.on_all_ranks(lambda: save(own, _rank_file(path, exchange.rank)))
        # Last, so that a folder without it is none, and one with it is whole.
        exchange.on_rank_zero(lambda: save(averaged, path / AVERAGED))

    return write


def read_own(
    path: Path, rank: int, saved_ranks: int, step: int, read: Callable[[Path], dict[str, Any]]
) -> dict[str, Any]:
    """Read what a rank had of its own.

    Args:
        path: the folder.
        rank: of those that wrote it.
        saved_ranks: how many these were.
        step: that the file with the averages belongs to.
        read: reads a file.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the file belongs to another step.
    """
    names = (_rank_file(path, each).name for each in range(saved_ranks))
    missing = list(itertools.islice((name for name in names if not (path / name).is_file()), _SHOWN))
    if missing:
        raise FileNotFoundError(
            f"{path} lacks {', '.join(missing)}: was it copied from one node of several, or not written to a "
            f"folder that all nodes share? {path / AVERAGED} alone starts from the averages: give its path."
        )
    own = read(_rank_file(path, rank))
    if own[ENTRY]["step"] != step:
        raise ValueError(
            f"{_rank_file(path, rank)} is of step {own[ENTRY]['step']}, but {AVERAGED} beside it of step {step}: the "
            f"folder was overwritten in part. Use an earlier checkpoint, or {path / AVERAGED} alone."
        )
    return own


def _rank_file(path: Path, rank: int) -> Path:
    return path / f"rank_{rank:05d}.pt"
