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
# Entries of Lightning's checkpoint that differ between ranks.
_OF_RANK = ("optimizer_states", "lr_schedulers")


def cloned(state: dict[str, Any]) -> dict[str, Any]:
    """Replace the tensors of a state dict by copies, so that they do not change with the module.

    Names of one tensor get one copy: otherwise tied weights would be written twice.
    """
    copied: dict[int, Any] = {}  # by it, deepcopy copies a memory once for all tensors that share it
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = copy.deepcopy(value.detach(), copied)
    return state


def rank_part(checkpoint: dict[str, Any], precision: str) -> dict[str, Any]:
    """Return the entries of a checkpoint that differ between ranks; `precision` is that of the precision plugin."""
    return {name: checkpoint[name] for name in (*_OF_RANK, precision) if name in checkpoint}


def writer(checkpoint_io: CheckpointIO) -> WriteStaged:
    """Return a function that writes a folder, in steps that all ranks take together.

    Its content is a pair: the checkpoint with the averages, on rank 0, and the entries of this rank alone.
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

        averaged, local = content
        exchange.on_rank_zero(begin_folder)
        exchange.on_all_ranks(lambda: save(local, _rank_file(path, exchange.rank)))
        # Last: a folder without this file is no checkpoint, and one with it is complete.
        exchange.on_rank_zero(lambda: save(averaged, path / AVERAGED))

    return write


def read_rank_part(
    path: Path, rank: int, saved_ranks: int, step: int, read: Callable[[Path], dict[str, Any]]
) -> dict[str, Any]:
    """Read the file of one of the ranks that wrote a folder, with the averages of a step.

    Raises:
        FileNotFoundError: the file of any rank is missing.
        ValueError: the file belongs to another step.
    """
    names = (_rank_file(path, each).name for each in range(saved_ranks))
    missing = list(itertools.islice((name for name in names if not (path / name).is_file()), _SHOWN))
    if missing:
        raise FileNotFoundError(
            f"{path} lacks {', '.join(missing)}: was it copied from one node of several, or not written to a "
            f"folder that all nodes share? {path / AVERAGED} alone starts from the averages: give its path."
        )
    local = read(_rank_file(path, rank))
    if local[ENTRY]["step"] != step:
        raise ValueError(
            f"{_rank_file(path, rank)} is of step {local[ENTRY]['step']}, but {AVERAGED} beside it of step {step}: the "
            f"folder was overwritten in part. Use an earlier checkpoint, or {path / AVERAGED} alone."
        )
    return local


def _rank_file(path: Path, rank: int) -> Path:
    return path / f"rank_{rank:05d}.pt"
