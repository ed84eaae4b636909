"""How far the main thread is, as it notes itself: a few attribute writes a batch."""

from __future__ import annotations

import time

# What takes long without a batch going by: models are built, sharded, compiled and loaded; checkpoints are written.
START, CHECKPOINT, STANDSTILL, END = "start-up", "writing a checkpoint", "standing still", "end of the run"
TRAINING = "training"
# A pause may be so many times as long as the longest until then.
_GROWTH = 3


class Progress:
    """Notes of the main thread, read by the watch's.

    Args:
        stall_after_s: how long a healthy run may go without a note, in seconds.
        slow_after_s: the same up to the end of the first batch, and then in all but the training itself: validations,
            ends of epochs, checkpoints.
    """

    def __init__(self, stall_after_s: float, slow_after_s: float) -> None:
        self._limits_s = (stall_after_s, slow_after_s)
        self._longest_s = 0.0
        self._noted_at = time.monotonic()
        self._warm = False
        self.phase = START

    def note(self, phase: str) -> None:
        """Something was done.

        Args:
            phase: what comes now.
        """
        now = time.monotonic()
        if self.phase not in (START, CHECKPOINT, STANDSTILL):
            self._longest_s = max(self._longest_s, now - self._noted_at)
        self._noted_at, self.phase = now, phase

    def batch_done(self, phase: str) -> None:
        """As `note`, at the end of a batch of the kind that the run is for: from now on nothing is new."""
        self.note(phase)
        self._warm = True

    def touch(self) -> None:
        """Something was done, as another thread sees it; the phase stays."""
        self._noted_at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last note."""
        return time.monotonic() - self._noted_at

    @property
    def limit_s(self) -> float:
        """How long the present pause may last, in seconds; without end while the ranks stand still on purpose."""
        if self.phase == STANDSTILL:
            return float("inf")
        usual_s, slow_s = self._limits_s
        return max(usual_s if self._warm and self.phase == TRAINING else slow_s, _GROWTH * self._longest_s)
