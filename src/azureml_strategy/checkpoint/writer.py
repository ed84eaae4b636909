"""Writes checkpoints: on a background thread of each rank, from a copy, or at once while training waits."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from azureml_strategy.checkpoint.checkpoint_io import WriteStaged, make_plain, stage
from azureml_strategy.checkpoint.folder import CheckpointFolder, Summed, by_score, superfluous
from azureml_strategy.checkpoint.host_copy import HostCopyBuffer
from azureml_strategy.checkpoint.manifest import Manifest, StoredFile, look
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.control.channel import another_connection
from azureml_strategy.control.gather import Exchange, GroupExchange, StepError, StoreExchange, gather

Result = TypeVar("Result")
log = logging.getLogger(__name__)

# What the disk must have beside a checkpoint as large as the last one: its manifest, and what others write.
_SPARE_BYTES = 16 << 20
WriteParts = Callable[[Path, Exchange], Summed | None]
"""Writes this rank's files of a checkpoint to a path; called by all ranks, on which it fails alike.

It returns, on all ranks, what is on disk and summed already; None where every file is to be read back.
"""
_STORE_TIMEOUT = timedelta(seconds=60)
# How long a process that has failed stays for a checkpoint to be complete: other ranks may be gone.
_LAST_WAIT_SECONDS = 60.0
# A wait that somebody wants to know of.
_LONG_WAIT_SECONDS = 1.0


class Behind(Generic[Result]):
    """A thread that does one thing, and after that the next.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._result: Result | None = None

    @property
    def busy(self) -> bool:
        """Whether something was begun that `finish` has not been called for."""
        return self._thread is not None

    def begin(self, work: Callable[[], Result | None]) -> None:
        """Do something on the thread; what was begun before must be finished.

        Args:
            work: what raises there is logged, and gives None.
        """
        assert self._thread is None, "one at a time"

        def run() -> None:
            try:
                self._result = work()
            except Exception as error:  # nobody else would see it
                log.warning("%s: %s: %s", self._name, type(error).__name__, redact_text(str(error)))

        # A daemon: where other ranks are gone, an interpreter that waits for it would not end.
        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float | None = None) -> Result | None:
        """Wait for what was begun, and forget it.

        Args:
            timeout_s: how long at most, in seconds; None without end.

        Returns:
            Its result; None where it failed, or is not done in time.
        """
        thread = self._thread
        if thread is None:
            return None
        thread.join(timeout_s)  # may be interrupted: then it is still under way
        self._thread = None
        result, self._result = (None, None) if thread.is_alive() else (self._result, None)
        return result


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


class Saving:
    """The way of a checkpoint from the memory of the ranks to the disk; used by the main thread.

    Between `connect` and `close` checkpoints are written by a thread of each rank, from a copy, wherever the strategy
    can tell what it would write. Else training waits.
    """

    def __init__(self) -> None:
        self._buffer = HostCopyBuffer()
        self._behind = Behind[Written]("checkpoint-writer")
        self._threads: StoreExchange | None = None
        self._broken = False
        self._written: Written | None = None

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint is being written, or was, and `finish` not called since."""
        return self._behind.busy

    def connect(self, trainer: Trainer) -> None:
        """Let the ranks' threads find one another, or find one another again; a collective."""
        # a name of their own: below torchrun the store outlives the processes
        name = trainer.strategy.broadcast(uuid.uuid4().hex)

        def connection() -> Store | None:
            store = another_connection(trainer.world_size, _STORE_TIMEOUT)
            return None if store is None else PrefixStore(f"azureml_strategy/checkpoint/{name}", store)

        store = connection()
        missing = [rank for rank, found in enumerate(gather(store is not None)) if not found]
        self._disconnect()
        if store is not None and not missing:
            self._threads = StoreExchange(store, trainer.global_rank, trainer.world_size, connection)
        else:
            rank_zero_warn(
                "Training waits while a checkpoint is written, as threads of the ranks do not find one another: the "
                f"process group was not made with MASTER_ADDR and MASTER_PORT, or rank(s) {missing} cannot connect "
                "there. Use an azureml_* strategy, or say JobCheckpoint(asynchronous=False)."
            )

    def save(self, trainer: Trainer, draft: Manifest, writer: CheckpointWriter) -> None:
        """Write a checkpoint, or begin to; a collective. The one before must be finished.

        Args:
            trainer: has trained to the end of a step.
            draft: what the manifest will say, but for the files.
            writer: writes it.

        Raises:
            UnsavableStateError: on all ranks, something that a restart could not be given back.
        """
        started = time.monotonic()
        if self._broken:
            self.connect(trainer)
        checkpoint = make_plain(trainer.strategy, trainer._checkpoint_connector.dump_checkpoint(weights_only=False))
        staged = stage(trainer.strategy, checkpoint) if self._threads is not None else None
        if staged is None or self._threads is None:
            self._written = writer.write(draft, _at_once(trainer, checkpoint), GroupExchange(trainer.global_rank))
            _report(writer, self._written, started, time.monotonic() - started)
            return
        write_parts, threads = self._copied(*staged), self._threads
        stood_still = time.monotonic() - started

        def write() -> Written | None:
            with threads.telling():
                written = writer.write(draft, write_parts, threads)
            _report(writer, written, started, stood_still)
            return written

        self._behind.begin(write)

    def finish(self) -> Written | None:
        """Wait for what was begun; a collective.

        Returns:
            The checkpoint; None where there was none to wait for, or it failed.
        """
        started = time.monotonic()
        written, self._written = self._agreed() if self._behind.busy else self._written, None
        waited = time.monotonic() - started
        if waited > _LONG_WAIT_SECONDS:
            rank_zero_info(f"Training has waited {waited:.1f} s for a checkpoint to be written.")
        return written

    def close(self) -> Written | None:
        """Wait for what was begun, but not without end: other ranks may have failed.

        Returns:
            The checkpoint, if it is complete.
        """
        written = self._behind.finish(_LAST_WAIT_SECONDS)
        self._buffer = HostCopyBuffer()  # the old one's memory is not needed any more
        self._disconnect()
        return written

    def _agreed(self) -> Written | None:
        """What rank 0 has written, on all ranks: if their threads lost one another, the last word is known to few."""
        written = self._behind.finish()
        outcomes = gather((written is not None, self._threads is not None and self._threads.broken))
        self._broken = any(broken for _, broken in outcomes)
        if not outcomes[0][0]:
            return None
        return written if all(known for known, _ in outcomes) else gather(written)[0]

    def _disconnect(self) -> None:
        if self._threads is not None:
            self._threads.close()
        self._threads, self._broken = None, False

    def _copied(self, content: Any, write: WriteStaged) -> WriteParts:
        """Copy what is to be written, and give what writes the copy."""
        try:
            copy = self._buffer.copy(content)
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            failed = OSError(f"its state cannot be copied ({type(error).__name__}: {error})")
            return lambda path, exchange: write(_content(exchange, lambda: _raise(failed)), path, exchange)
        return lambda path, exchange: write(_content(exchange, copy.content), path, exchange)


def _at_once(trainer: Trainer, checkpoint: dict[str, Any]) -> WriteParts:
    """As in `Trainer.save_checkpoint`, without the barrier at its end, which an error would keep a rank from."""

    def write(path: Path, exchange: Exchange) -> None:
        exchange.together(lambda: trainer.strategy.save_checkpoint(checkpoint, str(path)))

    return write


def _content(exchange: Exchange, get: Callable[[], Any]) -> Any:
    """What this rank is to write, if all ranks have theirs."""
    content: list[Any] = []
    exchange.together(lambda: content.append(get()))
    return content[0]


def _raise(error: Exception) -> NoReturn:
    raise error


def _report(writer: CheckpointWriter, written: Written | None, started: float, stood_still: float) -> None:
    if written is None:
        return
    size = sum(file.size for file in written.manifest.files.values())
    rank_zero_info(
        f"Checkpoint {writer.folder.path / written.manifest.name} ({written.manifest.reason}, {size / 1e6:,.1f} MB in "
        f"{time.monotonic() - started:.1f} s; training stood still for {stood_still:.2f} s)"
    )
