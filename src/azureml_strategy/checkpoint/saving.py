"""Takes checkpoints out of a training, and has them written: behind it, or while it waits."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from azureml_strategy.checkpoint.behind import Behind
from azureml_strategy.checkpoint.exchange import Exchange, GroupExchange, StoreExchange
from azureml_strategy.checkpoint.host_copy import HostCopyBuffer
from azureml_strategy.checkpoint.manifest import Manifest
from azureml_strategy.checkpoint.random_state import gather
from azureml_strategy.checkpoint.staging import WriteStaged, make_plain, stage
from azureml_strategy.checkpoint.storage_write import CheckpointWriter, WriteParts, Written
from azureml_strategy.network.rendezvous import another_connection

_STORE_TIMEOUT = timedelta(seconds=60)
# How long a process that has failed stays for a checkpoint to be complete: other ranks may be gone.
_LAST_WAIT_SECONDS = 60.0
# A wait that somebody wants to know of.
_LONG_WAIT_SECONDS = 1.0


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
