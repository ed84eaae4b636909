"""A clock that a module under test reads, so that no pause of the machine's is one of the test's."""

from __future__ import annotations


class Clock:
    """Seconds that pass when the test says so, or when the module sleeps; takes the place of `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
