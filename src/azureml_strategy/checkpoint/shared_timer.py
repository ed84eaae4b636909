"""A timer that all ranks agree on."""

from __future__ import annotations

import time
from collections.abc import Callable

Broadcast = Callable[[tuple[int, bool]], tuple[int, bool]]


class SharedTimer:
    """Measures an interval of time on rank 0, and shares the result with all ranks by a few collectives.

    Clocks differ between ranks, so rank 0 must decide. It does not broadcast at each batch: from the duration of the
    batches so far, it says after how many batches half of the remaining time will be over. No rank asks before.

    Args:
        interval_s: seconds.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self.restart()

    def restart(self) -> None:
        """Restart the interval. Call it on all ranks at the same batch."""
        self._since = time.monotonic()
        self._batches = 0
        self._ask_at = 1

    def due(self, broadcast: Broadcast) -> bool:
        """Count a batch, and tell whether the interval is over.

        Args:
            broadcast: returns rank 0's value on every rank.
        """
        self._batches += 1
        if self._batches < self._ask_at:
            return False
        elapsed = time.monotonic() - self._since
        left = self._interval_s - elapsed
        pause, due = broadcast((max(1, int(left / elapsed * self._batches / 2)), left <= 0))
        self._ask_at = self._batches + pause
        return due
