"""Finds what a run waits for most, why, what to try, and how much that gains at most.

`judge` takes shares and seconds as the run logs them (`step/..._share`, `time/..._s`) and returns a `Verdict`. The
table at the end of a run, its tag `azureml_strategy.verdict` and its page show the same one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from azureml_strategy.cluster.job import format_money
from azureml_strategy.tracking.remedies import GOOD_MFU, RunFacts, computing, run_remedies, slow_rank, step_remedies

# A smaller part is not worth a change: it is within the spread between two runs of the same configuration.
_WORTH_IT = 0.05
# Start-up takes as long in a short run as in a long one, so it says nothing about a run that was only tried out.
_LONG_RUN_S = 600.0
# The sum of shares may differ from 1 by so much, since they were logged one by one, or averaged.
_ROUNDING = 0.005
# A standard error from fewer steps is unreliable itself.
LEAST_STEPS = 12
# A part counts if it is worth a change even when it is this many standard errors smaller than measured. The margin is
# wide because the verdict names the largest of several parts.
_CERTAIN = 3.0
_COMPUTING = ("forward", "backward")

NAMES: Mapping[str, str] = {
    "data_wait": "waiting for data",
    "copy": "copying to the device",
    "forward": "forward",
    "forward_wait": "waiting in forward",
    "backward": "backward",
    "host": "waiting for the host",
    "communication": "exposed communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "other": "loggers, callbacks, Python",
}
"""What a part of the step is called, by its name in `step/NAME_share`, in the order in which a step has them."""

PHASES: Mapping[str, str] = {
    "startup": "start-up",
    "training": "training",
    "validation": "validation",
    "checkpoint": "checkpoints",
    "redone": "work done again",
    "other": "everything else",
}
"""What a part of the run is called, by its name in `time/NAME_s`."""


def whole_shares(shares: Mapping[str, float]) -> dict[str, float]:
    """The shares of a step, if none is negative and they add up to 1; else an empty mapping."""
    is_whole = min(shares.values(), default=0.0) >= 0 and math.isclose(sum(shares.values()), 1.0, abs_tol=_ROUNDING)
    return dict(shares) if is_whole else {}


def mfu_text(mfu: float) -> str:
    """A utilisation with two significant digits: `0.42%`, `17%`."""
    percent = 100 * mfu
    digits = 1 - math.floor(math.log10(percent)) if percent > 0 else 0
    return f"{percent:.{max(digits, 0)}f}%"


@dataclass(frozen=True)
class Advice:
    """A part of the time that something can be done about.

    Attributes:
        part: its name: a part of the step, a part of the run (`startup`, ...), `slow_rank` or `computing`.
        share: the part of the run's time that would be gone if this were gone entirely, 0 to 1.
        what: what takes this time, with its share: `data: 41% of each step`.
        action: what to try: one or two sentences.
        saving: money that the run would have saved at most, with its currency; empty if the cost is not known.
        is_bound: whether `share` is known to bound the gain. What a network can reach at most is not known.
    """

    part: str
    share: float
    what: str
    why: str
    action: str
    saving: str = ""
    is_bound: bool = True

    @property
    def speed_up(self) -> float:
        """How many times as fast the run would be at most, by Amdahl's law with an infinitely fast part."""
        return 1 / (1 - min(self.share, 0.99))

    @property
    def gain(self) -> str:
        """The gain in percent and money, as a sentence; empty if nothing bounds it."""
        if not self.is_bound:
            return ""
        percent = 100 * (self.speed_up - 1)
        money = f", {self.saving} less for this run" if self.saving else ""
        return f"At most {percent:.0f}% faster{money}."


@dataclass(frozen=True)
class Verdict:
    """What a run waits for most, and what to do about it.

    Attributes:
        headline: one sentence: what the run waits for most, or that it does not wait.
        advice: what to try, the largest wait first and computing last; empty if nothing is worth it, or was measured.
        measured: whether the run has measured where its time goes.
    """

    headline: str
    advice: tuple[Advice, ...] = ()
    measured: bool = True

    @property
    def part(self) -> str:
        """The name of the part that the run waits for most; empty if there is none."""
        return self.advice[0].part if self.advice else ""

    @property
    def line(self) -> str:
        """The verdict for a console or a tag: the headline, what to try and the gain."""
        first = self.advice[0] if self.advice else None
        return " ".join(filter(None, (self.headline, first.action, first.gain))) if first else self.headline


def judge(
    shares: Mapping[str, float],
    times: Mapping[str, float] | None = None,
    facts: RunFacts | None = None,
    errors: Mapping[str, float] | None = None,
) -> Verdict:
    """Find what a run waits for most.

    Args:
        shares: parts of a step, 0 to 1, by the names in `NAMES`. They are all of it, or the wait for data alone; others
            judge nothing.
        times: seconds of the parts of the run, by the names in `PHASES`. Without them the run counts as all training.
        errors: standard errors of the shares, as far as they are known.
    """
    facts = facts or RunFacts()
    shares = {name: share for name, share in shares.items() if name in NAMES and 0 <= share <= 1}
    shares = shares if set(shares) == {"data_wait"} else whole_shares(shares)
    times = {name: times[name] for name in PHASES if 0 < times.get(name, 0) < math.inf} if times else {}
    if sum(times.values()) < _LONG_RUN_S:  # a run that was only tried out
        times.pop("startup", None)
    if not shares and not times:
        return Verdict("This run did not measure where its time goes.", measured=False)
    if facts.steps is not None and facts.steps < LEAST_STEPS:
        return Verdict(
            f"{facts.steps} step{'s were' if facts.steps != 1 else ' was'} measured, too few to say what this run "
            f"waits for: {LEAST_STEPS} after the warm-up tell."
        )
    training = times.get("training", 0.0) / sum(times.values()) if times else 1.0
    found = [*_step_advice(shares, training, facts), *_run_advice(times, facts)]
    margins = {name: _CERTAIN * error * training for name, error in (errors or {}).items()}
    worth = [each for each in found if each.share - margins.get(each.part, 0.0) >= _WORTH_IT]
    worth.sort(key=lambda each: (each.part == "computing", -each.share))
    return Verdict(_headline(worth, shares), tuple(worth))


def _headline(worth: list[Advice], shares: Mapping[str, float]) -> str:
    if worth and worth[0].part != "computing":
        return f"This run waits most for {worth[0].what}."
    if not worth and set(shares) == {"data_wait"}:
        return f"Data come in time ({shares['data_wait']:.1%} of a step waits for them); nothing else was measured."
    computing = sum(shares.get(name, 0.0) for name in _COMPUTING)
    busy = f"{computing:.0%} of a step computes" if computing else "its steps take nearly all of the time"
    if worth:
        return f"This run waits for nothing; {busy}, but slowly: {worth[0].what}."
    return f"This run waits for nothing that is worth a change: {busy}."


def _step_advice(shares: Mapping[str, float], training: float, facts: RunFacts) -> Iterator[Advice]:
    slow = min(facts.slow_share, shares.get("communication", 1.0)) if facts.slow_ranks else 0.0
    for name, (why, action) in step_remedies(facts).items():
        # While ranks wait for a slow one, they are in a collective. That time is not the network's fault.
        share = shares.get(name, 0.0) - (slow if name == "communication" else 0.0)
        if share > 0:
            yield _advice(name, share * training, f"{_WAITED_FOR[name]}: {share:.0%} of each step", why, action, facts)
    if slow:
        what = f"{', '.join(facts.slow_ranks)}: {slow:.0%} of each step"
        yield _advice("slow_rank", slow * training, what, *slow_rank(facts), facts)
    busy = sum(shares.get(name, 0.0) for name in _COMPUTING)
    if facts.mfu is not None and busy > facts.mfu / GOOD_MFU:
        # At a good utilisation, the step would still need time for its FLOPs.
        share = (busy - facts.mfu / GOOD_MFU) * training
        yield Advice("computing", share, f"MFU is {mfu_text(facts.mfu)}", *computing(facts), is_bound=False)


def _run_advice(times: Mapping[str, float], facts: RunFacts) -> Iterator[Advice]:
    for name, (why, action) in run_remedies(facts).items():
        if name in times:
            share = times[name] / sum(times.values())
            what = f"{PHASES[name]}: {share:.0%} of its time"
            yield _advice(f"run_{name}" if name == "other" else name, share, what, why, action, facts)


def _advice(part: str, share: float, what: str, why: str, action: str, facts: RunFacts) -> Advice:
    saving = "" if not facts.cost else f"{format_money(share * facts.cost)} {facts.currency}"
    # Ranks that share the cores of one machine may wait for one another where ranks on nodes of their own would not.
    is_bound = not (facts.one_machine and part in ("communication", "slow_rank"))
    return Advice(part, share, what, why, action, saving, is_bound)


_WAITED_FOR = {
    "data_wait": "data",
    "copy": "copies to the device",
    "forward_wait": "something in training_step",
    "host": "the host to launch kernels",
    "communication": "gradients from other ranks",
    "bubble": "other pipeline stages",
    "optimizer": "the optimizer",
    "other": "loggers, callbacks and Python",
}
