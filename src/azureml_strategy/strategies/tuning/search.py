"""The settings of DDP that decide how it communicates, and a search of the fastest with few trials: one property
after the other, then pairs with the default.
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from azureml_strategy.strategies.compression import Compression
from azureml_strategy.strategies.errors import ConfigurationError

_MIB = 2**20
# In MiB. Torch's own default is a first bucket of 1 and then 25. Between two of these the step time hardly differs.
_BUCKETS_MB = (5, 25, 100)
_FIRST_BUCKET_MB = 1
COMPRESSIONS: tuple[Compression, ...] = ("bf16", "fp16", "powersgd")
"""All of them."""
_COSTS = {
    "bf16": "gradients rounded to 8 bits of mantissa",
    "fp16": "gradients rounded to 11 bits of mantissa, and infinite above 65,504",
    "powersgd": "gradients of low rank, with error feedback: another optimization",
}
_NO_COST = "none: the same sums, in another order at most"
_STATIC_COST = "none, if each step uses the same parameters; wrong gradients otherwise"


@dataclass(frozen=True)
class Settings:
    """How DDP communicates.

    Attributes:
        bucket_cap_mb: size of a bucket of gradients in MiB; None for torch's default, 25 after a first one of 1.
        first_bucket_mb: size of the first bucket to be sent, in MiB; None for that of the others.
        static_graph: whether torch may take it that each step uses the same parameters.
        gradient_as_bucket_view: whether gradients lie in the buckets, which saves a copy.
        gradient_compression: `bf16`, `fp16` or `powersgd`; None sends gradients as they are.
        powersgd_rank: rank of PowerSGD's factors.
    """

    bucket_cap_mb: float | None = None
    first_bucket_mb: float | None = None
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    gradient_compression: Compression | None = None
    powersgd_rank: int = 1

    @property
    def accuracy_cost(self) -> str:
        """What these settings change in the results."""
        if self.gradient_compression is not None:
            return _COSTS[self.gradient_compression]
        return _STATIC_COST if self.static_graph else _NO_COST

    @property
    def lossless(self) -> bool:
        """Whether the gradients are those of stock DDP for every model."""
        return self.gradient_compression is None and not self.static_graph

    def arguments(self) -> dict[str, Any]:
        """The arguments of DistributedDataParallel.

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
        """In a few words: `bucket 25 MiB, bf16`."""
        size = "torch's buckets" if self.bucket_cap_mb is None else f"buckets of {self.bucket_cap_mb:g} MiB"
        words = [size]
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

    def to_plain(self) -> dict[str, Any]:
        """As `AzureMLDDPStrategy(...)` takes them."""
        return asdict(self)


def sizes_first_bucket() -> bool:
    """Whether this torch lets the first bucket have a size of its own beside others than torch's default."""
    return "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel.__init__).parameters


def allowed_compressions(lossy: bool | str | Sequence[str]) -> tuple[Compression, ...]:
    """The compressions that a user allows.

    Args:
        lossy: all of them, none, or their names.

    Raises:
        ConfigurationError: a name is unknown.
    """
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
    """The settings with each other compression that is allowed, and with none."""
    return [replace(base, gradient_compression=each) for each in (None, *allowed) if each != base.gradient_compression]


def bucket_sizes(base: Settings, gradient_bytes: int) -> list[Settings]:
    """The settings with other sizes of buckets, none of which is larger than all gradients.

    Args:
        base: the settings otherwise.
        gradient_bytes: of all gradients of the module.
    """
    whole = max(1, -(-gradient_bytes // _MIB))
    sizes = [None, *(size for size in _BUCKETS_MB if size < whole), whole]
    others = [replace(base, bucket_cap_mb=size, first_bucket_mb=None) for size in sizes]
    return [each for each in others if each != base]


def first_buckets(base: Settings) -> list[Settings]:
    """The settings with a first bucket of another size: a small one is sent sooner."""
    if base.bucket_cap_mb is None or base.bucket_cap_mb <= _FIRST_BUCKET_MB or not sizes_first_bucket():
        return []
    return [replace(base, first_bucket_mb=_FIRST_BUCKET_MB if base.first_bucket_mb is None else None)]


def copied_gradients(base: Settings) -> list[Settings]:
    """The settings with gradients beside the buckets.

    Not the other way round: who copies them may have a hook or an optimizer that cannot do with views.
    """
    return [replace(base, gradient_as_bucket_view=False)] if base.gradient_as_bucket_view else []


def static_graphs(base: Settings) -> list[Settings]:
    """The settings with a static graph; only on request, as one batch does not show whether a graph is static."""
    return [] if base.static_graph else [replace(base, static_graph=True)]


Measure = Callable[[Settings, int], Sequence[float]]
"""Measures some steps with settings: seconds of each, by the slowest rank; the same numbers on all ranks."""

# Steps of a trial. One alone says little on a noisy machine; the pairs at the end have the last word.
_STEPS = 2
# With those that warm up, at least.
_PASSES = 4
# Five pairs in a row that the pick wins, or all but one of eight, come by chance in 1 of 20 cases: 1/32 + 5/32 * 1/8.
_WINS_IN_A_ROW, _PAIRS = 5, 8
# A gain that a user would not see is not worth settings of its own.
_LEAST_GAIN = 0.02


@dataclass(frozen=True)
class Request:
    """What to beat, and what may be picked.

    Attributes:
        default: the settings to beat.
        lossy: the compressions that may be picked.
        static_graph: whether a static graph may be picked.
    """

    default: Settings
    lossy: tuple[Compression, ...] = ()
    static_graph: bool = False


@dataclass
class Trials:
    """What was measured.

    Attributes:
        seconds: of each step, by settings.
        pairs: seconds of a step by default and with the pick, side by side; the medians of a trial.
    """

    seconds: dict[Settings, list[float]] = field(default_factory=dict)
    pairs: list[tuple[float, float]] = field(default_factory=list)

    def median(self, settings: Settings) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds[settings])


class Search:
    """Looks for faster settings than the default ones.

    It takes the properties in the order of what they bring: compression, bucket size, first bucket, the rest. For each
    it tries the choices on top of the best so far, and measures the better half again, until one is left (successive
    halving, Jamieson and Talwalkar 2016, https://arxiv.org/abs/1502.07943). What is left then runs in turns with the
    default. It is the pick only if it wins so often that chance is unlikely.

    Args:
        measure: runs trials.
        request: the settings to beat, and what may be picked.
        gradient_bytes: of all gradients of the module.
        floor_s: seconds of a step without communication, which no settings can beat.
        look_again: measures `floor_s` again, over more steps: on a busy machine all of a few may be slow.
        tell: receives a line about each trial, and before them about their number.

    Attributes:
        trials: what was measured.
        why: words that say why the pick was picked or not, once `run` has ended.
    """

    def __init__(
        self,
        measure: Measure,
        request: Request,
        gradient_bytes: int,
        floor_s: float = 0.0,
        look_again: Callable[[], float] = lambda: math.inf,
        tell: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._measure = measure
        self._request = request
        self._default = request.default
        self._gradient_bytes = gradient_bytes
        self._floor_s = floor_s
        self._look_again = look_again
        self._tell = tell
        self._number = 0
        self.trials = Trials()
        self.why = ""

    def run(self) -> Settings:
        """Search, and return the pick: the default, unless others are significantly faster."""
        best, most = self._default, self._most_trials()
        self._tell(
            f"Up to {most} trials of {_PASSES} passes and more, {_PASSES * most * self._floor_s:,.0f} s at least; and "
            f"{2 * _WINS_IN_A_ROW} to {2 * _PAIRS} more if any settings are faster:"
        )
        self._try(best)
        if self._is_at_floor(best):
            self._floor_s = min(self._floor_s, self._look_again())
        if self._is_at_floor(best):
            self.why = "a step waits for hardly any communication, so that no settings can save much"
            return best
        if self._request.lossy:
            best = self._best([best, *compressions(best, self._request.lossy)])
        best = self._best([best, *bucket_sizes(best, self._gradient_bytes)])
        best = self._best([best, *first_buckets(best)])
        best = self._best([best, *copied_gradients(best)])
        if self._request.static_graph:
            best = self._best([best, *static_graphs(best)])
        if best == self._default:
            self.why = "no other settings were faster than the default"
        return best if best == self._default or self._wins(best) else self._default

    def _is_at_floor(self, settings: Settings) -> bool:
        return self.trials.median(settings) < (1 + _LEAST_GAIN) * self._floor_s

    def _best(self, candidates: list[Settings]) -> Settings:
        """Halve the candidates until one is left. The first one has been measured before."""
        for each in candidates[1:]:
            self._try(each)
        while len(candidates) > 1:
            candidates = sorted(candidates, key=self.trials.median)[: len(candidates) // 2]
            if len(candidates) > 1:
                for each in candidates:
                    self._try(each)
        return candidates[0]

    def _wins(self, pick: Settings) -> bool:
        """Run pick and default in turns, and say whether the pick is faster beyond chance."""
        pairs = self.trials.pairs
        while len(pairs) < _PAIRS:
            lost = sum(picked >= default for default, picked in pairs)
            if lost > 1 or (lost == 0 and len(pairs) == _WINS_IN_A_ROW):
                break  # decided
            order = [self._default, pick] if len(pairs) % 2 == 0 else [pick, self._default]
            measured = {each: statistics.median(self._try(each)) for each in order}
            pairs.append((measured[self._default], measured[pick]))
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
        """The number of trials before the pairs, if each property has all its choices."""
        default, request = self._default, self._request
        properties = [
            compressions(default, request.lossy) if request.lossy else [],
            sizes := bucket_sizes(default, self._gradient_bytes),
            max(map(first_buckets, [default, *sizes]), key=len),
            copied_gradients(default),
            static_graphs(default) if request.static_graph else [],
        ]
        return 1 + sum(len(each) + _halvings(len(each) + 1) for each in properties)

    def _try(self, settings: Settings) -> Sequence[float]:
        self._number += 1
        seconds = self._measure(settings, _STEPS)
        self.trials.seconds.setdefault(settings, []).extend(seconds)
        self._tell(f"  trial {self._number}: {settings.words()}: {1e3 * statistics.median(seconds):,.1f} ms a step")
        return seconds


def _halvings(candidates: int) -> int:
    """The number of trials that successive halving adds to one of each candidate."""
    half = candidates // 2
    return half + _halvings(half) if half > 1 else 0
