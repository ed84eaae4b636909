"""The settings of DDP that decide how it communicates, and a search for the fastest ones with few trials.

The search tries one property after the other. At the end the best settings run in pairs with the default.
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from torch.nn.parallel import DistributedDataParallel

from azureml_strategy.strategies.compression import Compression
from azureml_strategy.strategies.errors import ConfigurationError

_MIB = 2**20
# In MiB. Torch's own default is a first bucket of 1 and then 25. Between two of these the step time hardly differs.
_BUCKETS_MB = (5, 25, 100)
_FIRST_BUCKET_MB = 1
COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)
"""All compressions of gradients."""
_COSTS = {
    "bf16": "gradients rounded to 8 bits of mantissa",
    "fp16": "gradients rounded to 11 bits of mantissa, and infinite above 65,504",
    "powersgd": "gradients of low rank, with error feedback: another optimization",
}
_NO_COST = "none: the same sums, in another order at most"
_STATIC_COST = "none, if each step uses the same parameters; wrong gradients otherwise"


@dataclass(frozen=True)
class Settings:
    """How DDP communicates; the attributes are arguments of `AzureMLDDPStrategy`."""

    bucket_cap_mb: float | None = None
    first_bucket_mb: float | None = None
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    gradient_compression: Compression | None = None
    powersgd_rank: int = 1

    @property
    def accuracy_cost(self) -> str:
        """How these settings change the results, in words."""
        if self.gradient_compression is not None:
            return _COSTS[self.gradient_compression]
        return _STATIC_COST if self.static_graph else _NO_COST

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of DistributedDataParallel.

        Raises:
            ConfigurationError: this torch has no first bucket of its own size.
        """
        given: dict[str, Any] = {"gradient_as_bucket_view": self.gradient_as_bucket_view}
        if self.static_graph:
            given["static_graph"] = True
        if self.first_bucket_mb is None:
            return given if self.bucket_cap_mb is None else given | {"bucket_cap_mb": self.bucket_cap_mb}
        if not sizes_first_bucket():
            raise ConfigurationError(
                f"first_bucket_mb={self.first_bucket_mb} needs a torch whose DistributedDataParallel has "
                "bucket_cap_mb_list. Leave it out, or update torch."
            )
        # The last size is that of all further buckets. Torch's default is 25.
        return given | {"bucket_cap_mb_list": [self.first_bucket_mb, self.bucket_cap_mb or 25]}

    def words(self) -> str:
        """Describe the settings in a few words: `buckets of 25 MiB, bf16`."""
        words = ["torch's buckets" if self.bucket_cap_mb is None else f"buckets of {self.bucket_cap_mb:g} MiB"]
        if self.first_bucket_mb is not None:
            words.append(f"the first of {self.first_bucket_mb:g}")
        if self.gradient_compression is not None:
            rank = f" of rank {self.powersgd_rank}" if self.gradient_compression == "powersgd" else ""
            words.append(f"{self.gradient_compression}{rank}")
        if self.static_graph:
            words.append("static graph")
        if not self.gradient_as_bucket_view:
            words.append("gradients copied")
        return ", ".join(words)


def sizes_first_bucket() -> bool:
    """Whether this torch can size the first bucket apart from the others, by `bucket_cap_mb_list`."""
    return "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel.__init__).parameters


def allowed_compressions(lossy: bool | str | Sequence[str]) -> tuple[Compression, ...]:
    """Return the compressions that a user allows: all, none, or those named; refuse an unknown name."""
    if isinstance(lossy, bool):
        return COMPRESSIONS if lossy else ()
    names = [lossy] if isinstance(lossy, str) else list(lossy)
    unknown = [each for each in names if each not in COMPRESSIONS]
    if unknown:
        raise ConfigurationError(
            f"tune_lossy has {unknown[0]!r}, which is no compression. Give True or some of {', '.join(COMPRESSIONS)}."
        )
    return tuple(each for each in COMPRESSIONS if each in names)


def compressions(base: Settings, allowed: Sequence[Compression]) -> list[Settings]:
    """Return the settings with each other compression that is allowed, and with none; nothing if none is allowed."""
    kinds = (None, *allowed) if allowed else ()
    return [replace(base, gradient_compression=each) for each in kinds if each != base.gradient_compression]


def bucket_sizes(base: Settings, gradient_bytes: int) -> list[Settings]:
    """Return the settings with other sizes of buckets, up to the size of all gradients."""
    whole = max(1, -(-gradient_bytes // _MIB))
    sizes = [None, *(size for size in _BUCKETS_MB if size < whole), whole]
    others = [replace(base, bucket_cap_mb=size, first_bucket_mb=None) for size in sizes]
    return [each for each in others if each != base]


def first_buckets(base: Settings) -> list[Settings]:
    """Return the settings with a first bucket of another size: a small one is sent sooner."""
    if base.bucket_cap_mb is None or base.bucket_cap_mb <= _FIRST_BUCKET_MB or not sizes_first_bucket():
        return []
    return [replace(base, first_bucket_mb=_FIRST_BUCKET_MB if base.first_bucket_mb is None else None)]


def copied_gradients(base: Settings) -> list[Settings]:
    """Return the settings with gradients beside the buckets.

    Not the other way round: where a user has them copied, a hook or an optimizer may not work with views.
    """
    return [replace(base, gradient_as_bucket_view=False)] if base.gradient_as_bucket_view else []


Measure = Callable[[Settings, int], Sequence[float]]
"""Measures a number of steps with settings: seconds of each, on the slowest rank; the same numbers on all ranks."""

# Steps of a trial. On a noisy machine one step says little. The pairs at the end decide.
_STEPS = 2
# Passes of a trial with its warm-up, at least.
_PASSES = 4
# By chance the pick wins five pairs in a row, or all but one of eight, in 1 of 20 cases: 1/32 + 5/32 * 1/8.
_WINS_IN_A_ROW, _PAIRS = 5, 8
# A smaller gain is not worth other settings.
_LEAST_GAIN = 0.02


@dataclass(frozen=True)
class Request:
    """The default settings to beat; the compressions that may be picked, and whether a static graph may be."""

    default: Settings
    lossy: tuple[Compression, ...] = ()
    static_graph: bool = False


@dataclass
class Trials:
    """Measurements: seconds of each step by settings; pairs of a trial's median by default and with the pick."""

    seconds: dict[Settings, list[float]] = field(default_factory=dict)
    pairs: list[tuple[float, float]] = field(default_factory=list)

    def median(self, settings: Settings) -> float:
        """Return the seconds of a step."""
        return statistics.median(self.seconds[settings])


@dataclass
class Search:
    """Looks for faster settings than the default ones.

    It takes the properties in the order of their gain: compression, bucket size, first bucket, the rest. For each it
    tries the choices on top of the best settings so far, and measures the better half again, until one is left
    (successive halving, Jamieson and Talwalkar 2016, https://arxiv.org/abs/1502.07943). The last one then runs in turns
    with the default. It is picked only if it wins so often that chance is unlikely.

    Args:
        measure: runs trials.
        request: the settings to beat, and what may be picked.
        gradient_bytes: of all gradients of the module.
        floor_s: seconds of a step without communication, which no settings can beat.
        look_again: measures `floor_s` over more steps. On a busy machine a few steps may all be slow.
        tell: receives a line with the number of trials, and one for each trial.

    Attributes:
        trials: the measurements.
        why: why the pick was picked or not, in words, once `run` has ended.
    """

    measure: Measure
    request: Request
    gradient_bytes: int
    floor_s: float = 0.0
    look_again: Callable[[], float] = lambda: math.inf
    tell: Callable[[str], object] = lambda line: None
    trials: Trials = field(default_factory=Trials, init=False)
    why: str = field(default="", init=False)
    _number: int = field(default=0, init=False)

    def run(self) -> Settings:
        """Search, and return the pick: the default, unless others are significantly faster."""
        default, most = self.request.default, self._most_trials()
        best = default
        self.tell(
            f"Up to {most} trials of {_PASSES} passes and more, {_PASSES * most * self.floor_s:,.0f} s at least; and "
            f"{2 * _WINS_IN_A_ROW} to {2 * _PAIRS} more if any settings are faster:"
        )
        self._try(best)
        if self._is_at_floor(best):
            self.floor_s = min(self.floor_s, self.look_again())
        if self._is_at_floor(best):
            self.why = "a step waits for hardly any communication, so that no settings can save much"
            return best
        for choices in self._properties():
            best = self._best([best, *choices(best)])
        if best == default:
            self.why = "no other settings were faster than the default"
        return best if best == default or self._wins(best) else default

    def _properties(self) -> list[Callable[[Settings], list[Settings]]]:
        """List for each property, in the order of their gain, a function from settings to those with other choices."""
        # A static graph is tried only on request: one batch does not show whether a graph is static.
        static = self.request.static_graph
        return [
            lambda best: compressions(best, self.request.lossy),
            lambda best: bucket_sizes(best, self.gradient_bytes),
            first_buckets,
            copied_gradients,
            lambda best: [replace(best, static_graph=True)] if static and not best.static_graph else [],
        ]

    def _is_at_floor(self, settings: Settings) -> bool:
        return self.trials.median(settings) < (1 + _LEAST_GAIN) * self.floor_s

    def _best(self, candidates: list[Settings]) -> Settings:
        """Halve the candidates until one is left. The first one has been measured before."""
        to_try = candidates[1:]
        while len(candidates) > 1:
            for each in to_try:
                self._try(each)
            to_try = candidates = sorted(candidates, key=self.trials.median)[: len(candidates) // 2]
        return candidates[0]

    def _wins(self, pick: Settings) -> bool:
        """Run pick and default in turns, and return whether the pick is faster beyond chance."""
        pairs = self.trials.pairs
        while len(pairs) < _PAIRS:
            lost = sum(picked >= default for default, picked in pairs)
            if lost > 1 or (lost == 0 and len(pairs) == _WINS_IN_A_ROW):
                break  # decided
            order = [self.request.default, pick] if len(pairs) % 2 == 0 else [pick, self.request.default]
            measured = {each: statistics.median(self._try(each)) for each in order}
            pairs.append((measured[self.request.default], measured[pick]))
        won = sum(picked < default for default, picked in pairs)
        gain = statistics.median(default / picked for default, picked in pairs) - 1
        if len(pairs) - won > 1:
            self.why = f"{pick.words()} won only {won} of {len(pairs)} pairs with the default: that may be chance"
        elif gain < _LEAST_GAIN:
            self.why = f"{pick.words()} saves {gain:.1%}, less than {_LEAST_GAIN:.0%}"
        else:
            self.why = f"it won {won} of {len(pairs)} pairs with the default, {1 + gain:.2f} times as fast"
            return True
        return False

    def _most_trials(self) -> int:
        """Return the number of trials before the pairs, if each property has all its choices."""
        default = self.request.default
        bases = [default, *bucket_sizes(default, self.gradient_bytes)]  # the choices of a first bucket depend on it
        most = [max(len(choices(base)) for base in bases) for choices in self._properties()]
        return 1 + sum(each + _halvings(each + 1) for each in most)

    def _try(self, settings: Settings) -> Sequence[float]:
        self._number += 1
        seconds = self.measure(settings, _STEPS)
        self.trials.seconds.setdefault(settings, []).extend(seconds)
        self.tell(f"  trial {self._number}: {settings.words()}: {1e3 * statistics.median(seconds):,.1f} ms a step")
        return seconds


def _halvings(candidates: int) -> int:
    """Return the number of trials that successive halving adds to one of each candidate."""
    half = candidates // 2
    return half + _halvings(half) if half > 1 else 0
