"""How many optimizer steps a replica takes by itself before the replicas average, and when each part is exchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from azureml_strategy.strategies.errors import ConfigurationError

PeriodSchedule = Callable[[int, float], int]
"""The length of the next period, in optimizer steps, from the steps since the warm-up and the learning rate.

All ranks must get the same length.
"""


@dataclass(frozen=True)
class GrowingPeriod:
    """A period that grows with the training, as in post-local SGD (Lin et al. 2020, https://arxiv.org/abs/1808.07217).

    At first the replicas average often, while the weights change quickly.

    Args:
        first: steps of the first periods.
        factor: each next length is this many times the one before.
        every: steps after which the period grows.
        most: its greatest length.

    Raises:
        ConfigurationError: a number is out of range.
    """

    first: int = 1
    factor: float = 2.0
    every: int = 500
    most: int = 64

    def __post_init__(self) -> None:
        if not (1 <= self.first <= self.most and self.factor > 1 and self.every >= 1):
            raise ConfigurationError(
                f"{self} does not grow from one step or more to `most`. Give 1 <= first <= most, a factor above 1 and "
                "every >= 1."
            )

    def __call__(self, step: int, learning_rate: float) -> int:
        """Return the length of the period that begins after `step` steps."""
        grown = 0
        length = float(self.first)
        while length < self.most and grown < step // self.every:
            length, grown = length * self.factor, grown + 1
        return min(self.most, int(length))


@dataclass(frozen=True)
class QuadraticPeriod:
    """A period that grows as the learning rate falls: the quadratic synchronization rule.

    The length is (alpha / learning rate)^2, at least `least` (Gu et al. 2024, https://arxiv.org/abs/2310.14423). Where
    steps are small, replicas stay close together for longer. With an alpha of the root of `least` times the highest
    rate, the period begins to grow as soon as the rate falls.

    Args:
        alpha: in units of the learning rate.
        least: the shortest period, in steps.
        most: the longest one.

    Raises:
        ConfigurationError: a number is out of range.
    """

    alpha: float
    least: int = 4
    most: int = 256

    def __post_init__(self) -> None:
        if not (1 <= self.least <= self.most and self.alpha > 0):
            raise ConfigurationError(f"{self} gives no period. Give 1 <= least <= most and an alpha above 0.")

    def __call__(self, step: int, learning_rate: float) -> int:
        """Return the length of the period that begins after a step with this learning rate."""
        if learning_rate * self.most**0.5 <= self.alpha:
            return self.most
        return max(self.least, int((self.alpha / learning_rate) ** 2))


@dataclass(frozen=True)
class Rules:
    """What is averaged, how often and how; see `AzureMLLocalSGDStrategy`.

    The outer optimizer is that of DiLoCo (Douillard et al. 2023, https://arxiv.org/abs/2311.08105). Fragments, the
    delay and the mixing, there called alpha, are those of Streaming DiLoCo (Douillard et al. 2025,
    https://arxiv.org/abs/2501.18512).
    """

    period: int | PeriodSchedule = 16
    outer_learning_rate: float | None = None
    outer_momentum: float = 0.9
    compression: str | None = None
    fragments: int = 1
    delay: int = 0
    mixing: float | None = None

    def __post_init__(self) -> None:
        for wrong, words in (
            (isinstance(self.period, int) and self.period < 1, f"period={self.period}: no step at all. Give 1 or more"),
            (self.fragments < 1, f"fragments={self.fragments}. Give 1 or more"),
            (self.delay < 0, f"delay={self.delay}. Give 0 or more steps"),
            (
                self.compression not in (None, "bf16", "int8"),
                f"compression={self.compression!r}. Give 'bf16' or 'int8'",
            ),
            (self.mixing is not None and not 0 <= self.mixing <= 1, f"mixing={self.mixing}. Give 0 to 1"),
            (
                self.outer_learning_rate is not None and not self.outer_learning_rate > 0,
                f"outer_learning_rate={self.outer_learning_rate}. Give more than 0",
            ),
            (not 0 <= self.outer_momentum < 1, f"outer_momentum={self.outer_momentum}. Give 0 up to below 1"),
        ):
            if wrong:
                raise ConfigurationError(f"{words}.")
        if isinstance(self.period, int):
            self.check(self.period)

    @property
    def anchored(self) -> bool:
        """Whether each replica keeps a copy of the common parameters, and sends how its own differ from it."""
        return self.outer_learning_rate is not None or self.compression is not None

    @property
    def shortest(self) -> int:
        """The least possible length of the first period, before the schedule is asked."""
        if isinstance(self.period, GrowingPeriod):
            return self.period.first
        if isinstance(self.period, QuadraticPeriod):
            return self.period.least
        return self.period if isinstance(self.period, int) else 1

    def length(self, step: int, learning_rate: float) -> int:
        """Return the length of the period that begins after `step` steps, and refuse it as `check` does."""
        length = self.period if isinstance(self.period, int) else int(self.period(step, learning_rate))
        self.check(length)
        return length

    def check(self, length: int) -> None:
        """Refuse a period that is too short to exchange every fragment once."""
        if length < 1 or self.fragments > length:
            raise ConfigurationError(
                f"A period of {length} step(s) has no room for {self.fragments} fragments, of which each needs a step "
                "of its own. Give a longer period or fewer fragments."
            )
        if self.delay > length // self.fragments:
            raise ConfigurationError(
                f"delay={self.delay}, but a fragment comes every {length // self.fragments} step(s) of a period of "
                f"{length} with {self.fragments} fragment(s), and its exchange cannot take longer. Give a shorter "
                "delay, fewer fragments or a longer period."
            )

    def arrival(self, fragment: int, length: int) -> int:
        """Return the step of a period after which a fragment's average is applied: they are spread evenly over it."""
        return length * (fragment + 1) // self.fragments
