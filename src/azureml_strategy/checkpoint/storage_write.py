"""All ranks write one checkpoint, or find out together that it failed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

from azureml_strategy.checkpoint.exchange import Exchange, StepError
from azureml_strategy.checkpoint.manifest import Manifest, StoredFile, look
from azureml_strategy.checkpoint.storage_folder import CheckpointFolder, Summed, by_score, superfluous

log = logging.getLogger(__name__)

# What the disk must have beside a checkpoint as large as the last one: its manifest, and what others write.
_SPARE_BYTES = 16 << 20

WriteParts = Callable[[Path, Exchange], Summed | None]
"""Writes this rank's files of a checkpoint to a path; called by all ranks, on which it fails alike.

It returns, on all ranks, what is on disk and summed already; None where every file is to be read back.
"""


@dataclass(frozen=True)
class Written:
    """A checkpoint that is complete, the same on all ranks.

    Attributes:
        manifest: its own.
        scores: of the best checkpoints there are now, by their path, the best first.
    """

    manifest: Manifest
    scores: dict[str, float]


@dataclass(frozen=True)
class CheckpointWriter:
    """Writes checkpoints into a folder and removes superfluous ones; on any thread.

    Args:
        folder: where to.
        keep_last: how many of the newest stay.
        keep_best: how many of the best stay; -1 for all.
        passed_over: names of checkpoints that neither count nor go, because the run was resumed from an older one.
    """

    folder: CheckpointFolder
    keep_last: int
    keep_best: int
    passed_over: Collection[str] = ()

    def write(self, draft: Manifest, write_parts: WriteParts, exchange: Exchange) -> Written | None:
        """Write a checkpoint and its manifest; by all ranks.

        Args:
            draft: its manifest but for its files; a number is added to the name if there is such a checkpoint. That of
                rank 0 is written.
            write_parts: writes this rank's files.
            exchange: between the ranks.

        Returns:
            What was written; None, with a warning, where any rank failed.
        """
        name = None
        try:
            name = exchange.on_rank_zero(lambda: self._begin(draft.name))
            manifest = self._write(replace(draft, name=name), write_parts, exchange)
        except StepError as error:
            self._give_up(draft.step, name, str(error), exchange.rank)
            exchange.leave()
            return None
        scores = self._cleared_away(manifest, exchange)
        exchange.leave()
        return Written(manifest, scores)

    def _write(self, draft: Manifest, write_parts: WriteParts, exchange: Exchange) -> Manifest:
        summed = write_parts(self.folder.path / draft.name, exchange) or {}
        files = self._settle(draft.name, summed, exchange)
        manifest: Manifest = exchange.on_rank_zero(lambda: self.folder.commit(replace(draft, files=files)))
        return manifest

    def _begin(self, name: str) -> str:
        """The name to write under. Known beforehand, a full disk does not stop one rank in the middle."""
        name = self.folder.begin(name)
        free = self.folder.free_bytes()
        sizes = (
            (_SPARE_BYTES + sum(file.size for file in each.files.values()), each) for each in self.folder.complete()
        )
        # A manifest that says too much, and is not true, must not end all saving.
        needed = next((size for size, each in sizes if size <= free or look(self.folder.path, each.files) is None), 0)
        if free < needed:
            self.folder.remove(name)
            raise OSError(f"the disk has {free:,} bytes left, and it takes about {needed:,}")
        return name

    def _settle(self, name: str, summed: Summed, exchange: Exchange) -> dict[str, StoredFile]:
        """Have all files reach the disk and sum them, each on one of the ranks."""
        files = exchange.together(lambda: self.folder.listing(name))
        if not any(files):
            raise StepError("nothing was written")
        settled = exchange.together(lambda: self.folder.settle(_share(files, exchange.rank), summed))
        return dict(sorted(item for each in settled for item in each.items()))

    def _cleared_away(self, written: Manifest, exchange: Exchange) -> dict[str, float]:
        """The scores of what is left; none where that cannot be said. What was written counts whatever happens here."""
        try:
            return exchange.on_rank_zero(lambda: self._clear_away(written))
        except StepError as error:
            _warn(f"Older checkpoints in {self.folder.path} cannot be looked through: {error}", exchange.rank)
            return {}

    def _clear_away(self, written: Manifest) -> dict[str, float]:
        """Remove what may go; the scores of what is left. What was just written stays, wherever it is in the order."""
        counted = [each for each in self.folder.own() if each.name not in self.passed_over]
        rest = superfluous(counted, self.keep_last, self.keep_best, written.mode)
        gone = [each for each in rest if each.name != written.name]
        try:
            for each in gone:
                self.folder.remove(each.name)
        except OSError as error:
            _warn(f"Older checkpoints in {self.folder.path} cannot be deleted: {error}", rank=0)
        best = by_score([each for each in counted if each not in gone], written.mode)
        return {str(self.folder.path / each.name): each.score for each in best if each.score is not None}

    def _give_up(self, step: int, name: str | None, error: str, rank: int) -> None:
        _warn(
            f"No checkpoint at step {step}: {error}. Training goes on, and older checkpoints are as they were. If "
            f"the disk is to blame, make room in {self.folder.path}, or give another dirpath.",
            rank,
        )
        if name is not None and rank == 0:
            try:
                self.folder.remove(name)
            except OSError:
                return  # the next attempt's start removes it


def _warn(text: str, rank: int) -> None:
    """Python's warnings belong to all threads at once: what the main thread silences for itself would be lost."""
    if threading.current_thread() is threading.main_thread():
        rank_zero_warn(text)
    elif rank == 0:
        log.warning(text)


def _share(files: list[list[str]], rank: int) -> list[str]:
    """The files that this rank is to check: one that it sees, as a mount may show a file late on other nodes."""
    seen: dict[str, list[int]] = {}
    for owner, names in enumerate(files):
        for name in names:
            seen.setdefault(name, []).append(owner)
    return [name for i, (name, owners) in enumerate(sorted(seen.items())) if owners[i % len(owners)] == rank]
