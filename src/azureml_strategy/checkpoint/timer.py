"""When all ranks find that the time is up, at the same batch."""

from __future__ import annotations

import time
from collections.abc import Callable

Broadcast = Callable[[tuple[int, bool]], tuple[int, bool]]


class SharedTimer:
    """An interval of time, measured by rank 0 and known to all ranks at the cost of a few collectives.

    Clocks differ, so that rank 0 has to tell the others. It does not at each batch: it says after how many batches,
    by their duration so far, half of the time that is left will be over, and nobody asks before.

    Args:
        interval_s: seconds.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self.restart()

    def restart(self) -> None:
        """Begin the interval; on all ranks at the same batch."""
        self._since = time.monotonic()
        self._batches = 0
        self._ask_at = 1

    def due(self, broadcast: Broadcast) -> bool:
        """Count a batch; whether the interval is over.

        Args:
            broadcast: gives every rank what rank 0 gave.
        """
        self._batches += 1
        if self._batches < self._ask_at:
            return False
        elapsed = time.monotonic() - self._since
        left = self._interval_s - elapsed
        pause, due = broadcast((max(1, int(left / elapsed * self._batches / 2)), left <= 0))
        self._ask_at = self._batches + pause
        return due
