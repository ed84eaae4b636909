"""Handles SIGTERM outside `fit`: writes the pending metrics or keeps them in a file, then ends the process."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from azureml_strategy.tracking.writer import BatchWriter

# Azure ML gives a preempted node about 30 seconds. Leave the larger part to everything else.
_FLUSH_S = 10.0


class TerminationFlush:
    """Flushes a writer before SIGTERM's default action ends the process.

    It acts only if the default action would. A handler that exists already (the user's, or Lightning's during training)
    unwinds the process in its own way, and then `finalize` or the exit of the interpreter flushes.
    """

    def __init__(self, writer: BatchWriter) -> None:
        self._writer = writer
        self._pid = os.getpid()

    def install(self) -> None:
        """Handle SIGTERM from now on, unless another handler does. Only the main thread may set signal handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def remove(self) -> None:
        """Restore the default action of SIGTERM, if this is its handler."""
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        if signal.getsignal(signum) != self._on_sigterm:
            # Lightning's handler has wrapped this one. It stops the training loop and must not be delayed.
            self._writer.wake()
            return
        if os.getpid() == self._pid:  # a forked data loader worker inherits the handler but not the writer's thread
            self._writer.close(_FLUSH_S)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
