"""Says of a run that was read from its store what it waited for, where it stopped, and what to do next."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from azureml_strategy.reporting.collect import Ranks, RunRecord
from azureml_strategy.tracking.events import Event
from azureml_strategy.tracking.remedies import SETTINGS, RunFacts
from azureml_strategy.tracking.verdict import Verdict, judge

_MOST_STEPS = 3
# A rank that was slow once was only interrupted by something. In this share of the windows, it is slow.
_SLOW_WINDOWS = 0.2
_SHOWN_RANKS = 3


class NextStep(NamedTuple):
    """Something to do next."""

    title: str
    text: str
    gain: str = ""


def verdict_of(record: RunRecord) -> Verdict:
    """Judge a run by what it logged."""
    return judge(record.shares, record.times, facts_of(record), record.share_errors)


def facts_of(record: RunRecord) -> RunFacts:
    """The facts by which a run is judged, from what it logged."""
    workers = record.param("data/num_workers", "num_workers")
    slow, share = _slow_ranks(record)
    steps = record.metric("summary/steps")
    return RunFacts(
        loader_workers=int(workers) if workers.isdecimal() else None,
        strategy=record.param("strategy/_target_", "strategy").rpartition(".")[2],
        transport=record.run.tags.get("network.transport", ""),
        nodes=round(record.metric("summary/nodes") or len(record.network.get("nodes", ())) or 1),
        precision=record.param("trainer/precision", "precision"),
        optimizer=record.run.tags.get("azureml_strategy.optimizer", ""),
        hook=record.run.tags.get("azureml_strategy.longest_hook", ""),
        mfu=record.measured("mfu"),
        compiled=record.run.tags.get("azureml_strategy.compiled") == "true",
        replays=record.param("strategy/compile_mode") in ("reduce-overhead", "max-autotune"),
        keys=_keys(record),
        slow_ranks=slow,
        slow_share=share,
        steps=record.steps if steps is None else round(steps),
        one_machine=_is_on_one_machine(record),
        settings=_settings(record),
        cost=record.metric("cost/run"),
        currency=record.currency,
    )


def _is_on_one_machine(record: RunRecord) -> bool:
    """Whether all ranks shared the cores of one machine: an emulated run, or one on the CPU of one node."""
    if record.run.tags.get("azureml_strategy.emulated") == "true":
        return True
    ranks = record.ranks[-1].ranks if record.ranks else []
    places = {tuple(str(each.get(name)) for name in ("host", "node", "device")) for each in ranks}
    return len(places) == 1 and all(device == "cpu" for _, _, device in places)


def _settings(record: RunRecord) -> frozenset[str]:
    """The settings that a verdict may advise and that the run's recipe had set already."""
    places = zip(("data", "checkpoint", "strategy", "strategy"), SETTINGS, strict=True)
    return frozenset(name for place, name in places if record.param(f"{place}/{name}") not in ("", "False", "None"))


def _keys(record: RunRecord) -> frozenset[str] | None:
    """The keys of the run's recipe; None for a script, whose hyperparameters have no sections of a recipe."""
    names = record.run.params
    return frozenset(name.replace("/", ".") for name in names) if "trainer/precision" in names else None


def _slow_ranks(record: RunRecord) -> tuple[tuple[str, ...], float]:
    """The ranks that were slow again and again, and the part of a step for which the others waited for them."""
    windows = record.windows
    times_slow = Counter(rank for window in windows for rank in window["slow"])
    least = max(2, _SLOW_WINDOWS * len(windows))
    slow = [rank for rank, times in times_slow.most_common(_SHOWN_RANKS) if times >= least]
    step_s = record.measured("step_time_median_s")
    waits = [_lag_s(window) for window in windows if not window["slow"].keys().isdisjoint(slow)]
    if not slow or not waits or not step_s:
        return (), 0.0
    share = statistics.median(waits) / step_s * len(waits) / len(windows)
    return tuple(describe_rank(record.ranks[-1], rank) for rank in slow), min(share, 1.0)


def _lag_s(window: dict[str, Any]) -> float:
    """Seconds of a step by which the slowest rank is behind the median one."""
    own = [
        compute + waited
        for compute, waited in zip(window["compute_s"], window["data_wait_s"], strict=False)
        if isinstance(waited, float | int)
    ]
    return max(own) - statistics.median(own) if own else 0.0


def describe_rank(ranks: Ranks, rank: str) -> str:
    """A rank, whose number is given as text, with its node and device: `rank 3 (node-1, cuda:0)`."""
    for each in ranks.ranks:
        if str(each.get("rank")) == rank:
            place = ", ".join(str(each[name]) for name in ("host", "device") if name in each)
            return f"rank {rank} ({place})" if place else f"rank {rank}"
    return f"rank {rank}"


def last_stop(record: RunRecord) -> Event | None:
    """The event that ended the run; None if it went on after it, or ended as it should."""
    ends = [event for event in record.events if event.kind in ("crash", "stop", "hang", "start")]
    last = ends[-1] if ends else None
    return last if last and last.kind != "start" and record.run.status != "FINISHED" else None


def next_steps(record: RunRecord, verdict: Verdict) -> list[NextStep]:
    """The three things to do next, the most urgent one first."""
    return list(islice(_all_steps(record, verdict), _MOST_STEPS))


def _all_steps(record: RunRecord, verdict: Verdict) -> Iterator[NextStep]:
    is_recipe, stop = _keys(record) is not None, last_stop(record)
    if stop is not None:
        yield _AFTER_STOP[stop.kind]
    yield from _after_nan_loss(record, is_recipe)
    for place, advice in enumerate(verdict.advice):
        # Why the first part takes so long is said in the verdict already.
        yield NextStep(_TITLES[advice.part], f"{advice.why} {advice.action}" if place else advice.action, advice.gain)
    if not verdict.measured:
        yield NextStep(
            "Measure where the time goes",
            "Give the Trainer a ThroughputCallback() and a JobMLFlowLogger() of azureml_strategy.tracking, or train a "
            "recipe, which has both.",
        )
    if record.metric("cost/run") is None:
        way = "tracking.cost.price_per_hour" if is_recipe else "the variable AZUREML_STRATEGY_PRICE_PER_HOUR"
        yield NextStep("Tell the run its price", f"With {way} (of one node), a report also counts in money.")
    what = "study RECIPE --nodes 1,2,4" if is_recipe else "study --nodes 1,2,4 -- COMMAND"
    yield NextStep(
        "See how it scales",
        f"`azureml-strategy {what}` compares speed and cost of several sizes before the long run.",
    )


_AFTER_STOP = {
    "crash": NextStep(
        "Find what raised the exception",
        "The text above is what it said; the traceback is in the log of rank 0. The same command goes on from the "
        "newest checkpoint.",
    ),
    "hang": NextStep("Look at the ranks that hung", "The warning names them and the line where each one stood."),
    "stop": NextStep("Go on", "The same command with the same output folder goes on from the newest checkpoint."),
}


def _after_nan_loss(record: RunRecord, is_recipe: bool) -> Iterator[NextStep]:
    clip = "trainer.gradient_clip_val" if is_recipe else "gradient_clip_val of the Trainer"
    for name, series in record.series.items():
        if "loss" in name and series.missing:
            yield NextStep(
                "Find out why the loss is no number",
                f"{name} is NaN or infinite {series.missing} times, first at step {series.first_missing}. Try a lower "
                f"learning rate, clip gradients ({clip}), or use bf16 in place of fp16.",
            )
            return


_TITLES = {
    "data_wait": "Feed the device faster",
    "copy": "Copy less, or earlier",
    "forward_wait": "Wait less in training_step",
    "host": "Launch less, or faster",
    "communication": "Talk less, or over a faster network",
    "bubble": "Fill the pipeline",
    "optimizer": "Make the update cheaper",
    "other": "Do less between the steps",
    "slow_rank": "Replace the slow node",
    "computing": "Compute faster",
    "startup": "Start faster",
    "validation": "Validate less",
    "checkpoint": "Save in the background",
    "redone": "Lose less at a restart",
    "run_other": "Find the time outside of training",
}
