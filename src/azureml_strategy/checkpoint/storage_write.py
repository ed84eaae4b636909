"""All ranks write one checkpoint, or find out together that it failed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol, runtime_checkable

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from azureml_strategy.checkpoint.manifest import Manifest, StoredFile
from azureml_strategy.checkpoint.random_state import gather
from azureml_strategy.checkpoint.storage_folder import CheckpointFolder

# What the disk must have beside a checkpoint as large as the last one: its manifest, and what others write.
_SPARE_BYTES = 16 << 20
_FLUSH_SECONDS = 10.0


@runtime_checkable
class FlushingLogger(Protocol):
    """A logger that writes later than it is called."""

    def flush(self, timeout_s: float) -> bool:
        """Write what is queued, or give up after so many seconds."""
        ...


def write_checkpoint(
    trainer: Trainer, folder: CheckpointFolder, name: str, reason: str, score: float | None, mode: str
) -> Manifest | None:
    """Write a checkpoint and its manifest; a collective.

    Args:
        trainer: has trained to the end of a step.
        folder: where to.
        name: as wanted; a number is added if there is such a checkpoint.
        reason: why, for the manifest.
        score: of the monitored metric, or None.
        mode: which score is better, `min` or `max`.

    Returns:
        The manifest, on all ranks; None, with a warning, where any of them failed.
    """
    name, error = trainer.strategy.broadcast(_begin(trainer, folder, name))
    if error is None:
        error = _first(gather(_save_state(trainer, folder.path / name)))
    files = gather(folder.listing(name) if error is None else [])
    settled = gather(_settle(folder, _share(files, trainer.global_rank)))
    error = error or _first([each[1] for each in settled])
    manifest = Manifest(
        name=name,
        step=trainer.global_step,
        epoch=trainer.current_epoch,
        saved_at=time.time(),
        world_size=trainer.world_size,
        reason=reason,
        score=score,
        mode=mode,
        files=dict(sorted(item for each, _ in settled for item in each.items())),
    )
    if error is None:
        error = trainer.strategy.broadcast(_commit(trainer, folder, manifest))
    if error is None:
        return manifest
    _give_up(trainer, folder, name, error)
    return None


def _begin(trainer: Trainer, folder: CheckpointFolder, name: str) -> tuple[str, str | None]:
    """The name to write under, and what is in the way."""
    if not trainer.is_global_zero:
        return name, None
    try:
        return folder.begin(name), _too_small(folder)
    except OSError as error:
        return name, str(error)


def _too_small(folder: CheckpointFolder) -> str | None:
    """Known beforehand, a full disk does not stop one rank of a sharded checkpoint in the middle."""
    complete = folder.complete()
    needed = _SPARE_BYTES + sum(file.size for file in complete[0].files.values()) if complete else 0
    free = folder.free_bytes()
    return f"the disk has {free:,} bytes left, and it takes about {needed:,}" if free < needed else None


def _save_state(trainer: Trainer, path: Path) -> str | None:
    """Lightning's `Trainer.save_checkpoint`, without the barrier at its end, which an error would keep a rank from."""
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    try:
        trainer.strategy.save_checkpoint(checkpoint, str(path))
        return None
    except (OSError, RuntimeError) as error:  # torch's writers raise the latter for what the disk refuses
        return f"rank {trainer.global_rank}: {error}"


def _share(files: list[list[str]], rank: int) -> list[str]:
    """The files that this rank is to check: one that it sees, as a mount may show a file late on other nodes."""
    seen: dict[str, list[int]] = {}
    for owner, names in enumerate(files):
        for name in names:
            seen.setdefault(name, []).append(owner)
    return [name for i, (name, owners) in enumerate(sorted(seen.items())) if owners[i % len(owners)] == rank]


def _settle(folder: CheckpointFolder, files: list[str]) -> tuple[dict[str, StoredFile], str | None]:
    try:
        return folder.settle(files), None
    except OSError as error:
        return {}, str(error)


def _commit(trainer: Trainer, folder: CheckpointFolder, manifest: Manifest) -> str | None:
    """Write the manifest, when all that was logged before is written too: a resumed run does not log it again."""
    if not trainer.is_global_zero:
        return None
    for logger in trainer.loggers:
        if isinstance(logger, FlushingLogger):
            logger.flush(_FLUSH_SECONDS)
    try:
        folder.commit(manifest)
        return None
    except OSError as error:
        return str(error)


def _give_up(trainer: Trainer, folder: CheckpointFolder, name: str, error: str) -> None:
    rank_zero_warn(
        f"No checkpoint at step {trainer.global_step}: {error}. Training goes on, and older checkpoints are as they "
        f"were. Make room in {folder.path}, or give another dirpath."
    )
    if trainer.is_global_zero:
        try:
            folder.remove(name)
        except OSError:
            return  # the next attempt's start removes it


def _first(errors: list[str | None]) -> str | None:
    return next((error for error in errors if error is not None), None)
