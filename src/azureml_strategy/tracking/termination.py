"""SIGTERM outside `fit`: write what is queued, or keep it in a file, then end as the signal asks."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from azureml_strategy.tracking.writer import BatchWriter

# Azure ML gives a preempted node about 30 seconds; leave the larger part to everything else.
_FLUSH_S = 10.0


class TerminationFlush:
    """Flushes a writer before SIGTERM's default action ends the process.

    Only where the default action would act: a handler that is there already (Lightning's while it trains, the
    user's) unwinds the process in its own way, and `finalize` or the interpreter's exit flush then.

    Args:
        writer: what to flush.
    """

    def __init__(self, writer: BatchWriter) -> None:
        self._writer = writer
        self._pid = os.getpid()

    def install(self) -> None:
        """Handle SIGTERM from now on, unless somebody else does; signals belong to the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def remove(self) -> None:
        """Give SIGTERM its default action back, if this is its handler."""
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        if signal.getsignal(signum) != self._on_sigterm:
            # Lightning put its own handler around this one: it stops the training loop, and must not be held up.
            self._writer.wake()
            return
        if os.getpid() == self._pid:  # a forked data loader worker has the handler but not the writer's thread
            self._writer.close(_FLUSH_S)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
