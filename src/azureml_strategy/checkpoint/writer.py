"""Writes checkpoints: from a copy on a background thread of each rank, or at once while training waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from azureml_strategy.checkpoint.checkpoint_io import make_plain, stage
from azureml_strategy.checkpoint.folder import CheckpointFolder, FileChecksums, by_score, superfluous
from azureml_strategy.checkpoint.host_copy import HostCopyBuffer
from azureml_strategy.checkpoint.manifest import Manifest, StoredFile, look
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.control.gather import (
    Exchange,
    GroupExchange,
    SharedStore,
    StoreExchange,
    gather,
    open_shared_store,
)
from azureml_strategy.control.store import StepError
from azureml_strategy.interfaces import WriteStaged
from azureml_strategy.lightning_internals import dump_checkpoint

Result = TypeVar("Result")
log = logging.getLogger(__name__)

# Free disk space needed in addition to the size of the last checkpoint, for the manifest and for what others write.
_SPARE_BYTES = 16 << 20
WriteParts = Callable[[Path, Exchange], FileChecksums | None]
"""Writes this rank's files of a checkpoint to a path. All ranks call it, and it fails on all of them alike.

It returns, on all ranks, the files that are already on disk and summed; None if every file must be read back.
"""
# How long a failed process waits for a checkpoint to complete: other ranks may be gone.
_LAST_WAIT_SECONDS = 60.0
# Longer waits are logged.
_LONG_WAIT_SECONDS = 1.0


class BackgroundTask(Generic[Result]):
    """A background thread that does one task at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._result: Result | None = None

    @property
    def busy(self) -> bool:
        """Whether a task was begun and not yet finished."""
        return self._thread is not None

    def begin(self, work: Callable[[], Result | None]) -> None:
        """Run a task on the thread. If it raises, the exception is logged and the result is None."""
        assert self._thread is None, "one at a time"

        def run() -> None:
            try:
                self._result = work()
            except Exception as error:  # an exception in a thread would go unnoticed
                log.warning("%s: %s: %s", self._name, type(error).__name__, redact_text(str(error)))

        # It is a daemon: if other ranks are gone, it may never end, and the interpreter would wait for it at exit.
        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float | None = None) -> Result | None:
        """Wait up to `timeout_s` seconds for the task that was begun, and forget it. None if it failed or goes on."""
        thread = self._thread
        if thread is None:
            return None
        thread.join(timeout_s)  # after an interrupt here, the task is still under way
        self._thread = None
        result, self._result = (None, None) if thread.is_alive() else (self._result, None)
        return result


@dataclass(frozen=True)
class Written:
    """A complete checkpoint, and the scores of the best ones that exist now, by path, the best first."""

    manifest: Manifest
    scores: dict[str, float]


@dataclass(frozen=True)
class CheckpointWriter:
    """Writes checkpoints into a folder and removes superfluous ones, on any thread.

    `keep_last` of the newest and `keep_best` of the best stay; -1 keeps all that have a score. Checkpoints named in
    `passed_over` are neither counted nor deleted, because the run has resumed from an older one.
    """

    folder: CheckpointFolder
    keep_last: int
    keep_best: int
    passed_over: Collection[str] = ()

    def write(self, draft: Manifest, write_parts: WriteParts, exchange: Exchange) -> Written | None:
        """Write a checkpoint and its manifest. All ranks call this. None, with a warning, if any rank failed.

        The draft is the manifest without its files. Rank 0's is written, with a number added to a name that is taken.
        """
        name = None
        try:
            name = exchange.on_rank_zero(lambda: self._begin(draft.name))
            summed = write_parts(self.folder.path / name, exchange) or {}
            files = self._flush_and_checksum(name, summed, exchange)
            complete = replace(draft, name=name, files=files)
            manifest = exchange.on_rank_zero(lambda: self.folder.commit(complete))
        except StepError as error:
            self._give_up(draft.step, name, str(error), exchange.rank)
            exchange.leave()
            return None
        scores: dict[str, float] = {}  # without them, the checkpoint just written counts anyway
        try:
            scores = exchange.on_rank_zero(lambda: self._clear_away(manifest))
        except StepError as error:
            _warn(f"Older checkpoints in {self.folder.path} cannot be looked through: {error}", exchange.rank)
        exchange.leave()
        return Written(manifest, scores)

    def _begin(self, name: str) -> str:
        """Return the name to write under. Checking for a full disk first keeps a rank from failing halfway."""
        name = self.folder.begin(name)
        free = self.folder.free_bytes()
        sizes = (
            (_SPARE_BYTES + sum(file.size for file in each.files.values()), each) for each in self.folder.complete()
        )
        # A manifest that claims too many bytes must not end all saving, so it counts only if its files are there.
        needed = next((size for size, each in sizes if size <= free or look(self.folder.path, each.files) is None), 0)
        if free < needed:
            self.folder.remove(name)
            raise OSError(f"the disk has {free:,} bytes left, and it takes about {needed:,}")
        return name

    def _flush_and_checksum(self, name: str, summed: FileChecksums, exchange: Exchange) -> dict[str, StoredFile]:
        """Flush all files to disk and compute their checksums, each file on one of the ranks."""
        files = exchange.on_all_ranks(lambda: self.folder.listing(name))
        if not any(files):
            raise StepError("nothing was written")
        settled = exchange.on_all_ranks(lambda: self.folder.flush_and_checksum(_share(files, exchange.rank), summed))
        return dict(sorted(item for each in settled for item in each.items()))

    def _clear_away(self, written: Manifest) -> dict[str, float]:
        """Remove superfluous checkpoints, but never the one just written. Return the scores of those left."""
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
                return  # the next attempt removes the leftover files when it starts


def _warn(text: str, rank: int) -> None:
    """Warn on the main thread, log on any other.

    Python's warning filters are shared by all threads: what the main thread silences for itself would be lost.
    """
    if threading.current_thread() is threading.main_thread():
        rank_zero_warn(text)
    elif rank == 0:
        log.warning(text)


def _share(files: list[list[str]], rank: int) -> list[str]:
    """Return the files that this rank checks. It sees them all: a mount may show a file late on other nodes."""
    seen_by: dict[str, list[int]] = {}
    for owner, names in enumerate(files):
        for name in names:
            seen_by.setdefault(name, []).append(owner)
    return [name for i, (name, owners) in enumerate(sorted(seen_by.items())) if owners[i % len(owners)] == rank]


class BackgroundWriter:
    """Takes a checkpoint from the memory of the ranks to the disk. The main thread uses it.

    Between `connect` and `close`, a background thread of each rank writes checkpoints from a copy, if the strategy can
    stage what it writes. Otherwise training waits.
    """

    def __init__(self) -> None:
        self._buffer = HostCopyBuffer()
        self._background = BackgroundTask[Written]("checkpoint-writer")
        self._threads: StoreExchange | None = None
        self._broken = False
        self._written: Written | None = None

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint was begun and not yet finished."""
        return self._background.busy

    def connect(self, trainer: Trainer) -> None:
        """Connect the ranks' threads, or connect them again; a collective."""
        shared: SharedStore[None] = open_shared_store("JobCheckpoint", trainer.global_rank, trainer.world_size, None)
        self._disconnect()
        if shared.store is not None:
            self._threads = StoreExchange(shared.store)
        else:
            rank_zero_warn(
                "Training waits while a checkpoint is written, as threads of the ranks do not find one another: the "
                f"process group was not made with MASTER_ADDR and MASTER_PORT, or rank(s) {shared.unconnected} cannot "
                "connect there. Use an azureml_* strategy, or say JobCheckpoint(asynchronous=False)."
            )

    def save(self, trainer: Trainer, draft: Manifest, writer: CheckpointWriter) -> None:
        """Write a checkpoint, or begin to, between two steps; a collective. The previous one must be finished.

        Raises:
            UnsavableStateError: on all ranks, if the state contains something that a restart could not restore.
        """
        started = time.monotonic()
        if self._broken:
            self.connect(trainer)
        checkpoint = make_plain(trainer.strategy, dump_checkpoint(trainer))
        staged = stage(trainer.strategy, checkpoint) if self._threads is not None else None
        if staged is None or self._threads is None:
            self._written = writer.write(draft, _at_once(trainer, checkpoint), GroupExchange(trainer.global_rank))
            _report(writer, self._written, started, time.monotonic() - started)
            return
        write_parts, threads = self._write_copy(*staged), self._threads
        stood_still = time.monotonic() - started

        def write() -> Written | None:
            with threads.sharing_errors():
                written = writer.write(draft, write_parts, threads)
            _report(writer, written, started, stood_still)
            return written

        self._background.begin(write)

    def finish(self) -> Written | None:
        """Wait for the checkpoint that was begun; a collective. None if there is none, or it failed."""
        started = time.monotonic()
        written, self._written = self._outcome_of_rank_zero() if self._background.busy else self._written, None
        waited = time.monotonic() - started
        if waited > _LONG_WAIT_SECONDS:
            rank_zero_info(f"Training has waited {waited:.1f} s for a checkpoint to be written.")
        return written

    def on_rank_zero(self, trainer: Trainer, step: Callable[[], None]) -> None:
        """Run a step on rank 0, while the other ranks wait; a collective. No checkpoint may be under way.

        Threads that are connected wait for as long as rank 0 lives. Collectives of the training have a time limit.

        Raises:
            StepError, ExchangeError: the step failed; on all ranks.
        """
        connected = self._threads is not None and not self._broken
        exchange: Exchange = self._threads if connected and self._threads else GroupExchange(trainer.global_rank)
        exchange.on_rank_zero(step)
        exchange.leave()

    def close(self) -> Written | None:
        """Wait for the checkpoint that was begun, but only for a limited time: other ranks may have failed."""
        written = self._background.finish(_LAST_WAIT_SECONDS)
        self._buffer = HostCopyBuffer()  # free the old one's memory
        self._disconnect()
        return written

    def _outcome_of_rank_zero(self) -> Written | None:
        """Return rank 0's outcome on all ranks. If the threads have lost one another, only some ranks know it."""
        written = self._background.finish()
        outcomes = gather((written is not None, self._threads is not None and self._threads.broken))
        self._broken = any(broken for _, broken in outcomes)
        if not outcomes[0][0]:
            return None
        return written if all(known for known, _ in outcomes) else gather(written)[0]

    def _disconnect(self) -> None:
        if self._threads is not None:
            self._threads.close()
        self._threads, self._broken = None, False

    def _write_copy(self, content: Any, write: WriteStaged) -> WriteParts:
        """Copy the content, and return a function that writes the copy. It fails on all ranks if one has no copy."""
        failed: OSError | None = None
        try:
            copy = self._buffer.copy(content)
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            failed = OSError(f"its state cannot be copied ({type(error).__name__}: {error})")

        def write_copy(path: Path, exchange: Exchange) -> FileChecksums | None:
            own: list[Any] = []

            def get_copy() -> None:
                if failed is not None:
                    raise failed
                own.append(copy.content())

            exchange.on_all_ranks(get_copy)
            return write(own[0], path, exchange)

        return write_copy


def _at_once(trainer: Trainer, checkpoint: dict[str, Any]) -> WriteParts:
    """Write as `Trainer.save_checkpoint` does, but without its final barrier, which a failed rank would not reach."""

    def write(path: Path, exchange: Exchange) -> None:
        exchange.on_all_ranks(lambda: trainer.strategy.save_checkpoint(checkpoint, str(path)))

    return write


def _report(writer: CheckpointWriter, written: Written | None, started: float, stood_still: float) -> None:
    if written is None:
        return
    size = sum(file.size for file in written.manifest.files.values())
    rank_zero_info(
        f"Checkpoint {writer.folder.path / written.manifest.name} ({written.manifest.reason}, {size / 1e6:,.1f} MB in "
        f"{time.monotonic() - started:.1f} s; training stood still for {stood_still:.2f} s)"
    )
