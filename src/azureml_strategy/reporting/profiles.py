"""Reads what profiled ranks have left among a run's files: traces by their names, and summaries."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.profiling.kernel_names import printable, shorten
from azureml_strategy.reporting.artifacts import Artifacts

FOLDER = "profile"
"""Where they lie, among the artifacts and in the output folder alike."""
_SUMMARY = re.compile(r"summary_rank_(\d{1,7})\.json")
_TRACE = re.compile(r"trace_rank_(\d{1,7})_steps?_(\d+)(?:-(\d+))?\.json(?:\.gz)?")
# Of more ranks only the file names are shown; a bar of each is for reading, not for counting.
_MOST_RANKS = 8
_MOST_OPERATORS, _MOST_COLLECTIVES, _LONGEST_NAME = 12, 12, 60


class Spent(NamedTuple):
    """What one name took within the profiled steps."""

    name: str
    seconds: float
    calls: int


@dataclass(frozen=True)
class Summary:
    """What the profiled steps of a rank spent their time on; see `profiling.trace_summary`.

    Attributes:
        device: `gpu` or `cpu`, on which the times were taken.
        steps: numbers of the steps.
        window_s: seconds of all steps.
        parts: seconds by the names in `verdict.NAMES`; they add up to `window_s`. `forward` is all that computes.
        collectives: exposed seconds of each collective, most first.
        operators: seconds of the operators' own, most first.
    """

    device: str
    steps: Sequence[int]
    window_s: float
    parts: Mapping[str, float]
    collectives: Sequence[Spent]
    operators: Sequence[Spent]

    @property
    def idle(self) -> float:
        """The part of the steps in which nothing runs on the device, 0 to 1."""
        return (self.parts["data_wait"] + self.parts["other"]) / self.window_s

    @property
    def span(self) -> str:
        """The steps in words."""
        first, last = self.steps[0], self.steps[-1]
        return f"{first}" if first == last else f"{first} to {last}"


@dataclass(frozen=True)
class RankProfile:
    """The profile of a rank.

    Attributes:
        rank: global rank.
        traces: names of its traces, those of the later steps last.
        summary: of the newest trace; None where there is none, or none that can be read.
        problem: why there is no summary.
    """

    rank: int
    traces: Sequence[str]
    summary: Summary | None
    problem: str = ""

    @property
    def trace(self) -> str:
        """The trace that the summary is of; empty if it is not among the files."""
        if self.summary is None:
            return self.traces[-1] if self.traces else ""
        return next((each for each in self.traces if _last_step(each) >= self.summary.steps[-1]), "")


def read_profiles(places: Iterable[Artifacts]) -> list[RankProfile]:
    """Read what profiled ranks have left, in the order of the ranks.

    Args:
        places: where files may lie, the best place first: the run's artifacts, its output folder.
    """
    found: dict[int, RankProfile] = {}
    for place in places:
        names = place.names(FOLDER)
        traces: dict[int, list[str]] = {}
        for name in sorted(names, key=_last_step):
            if match := _TRACE.fullmatch(name):
                traces.setdefault(int(match[1]), []).append(name)
        with_summary = {int(match[1]) for name in names if (match := _SUMMARY.fullmatch(name))}
        for rank in sorted({*traces, *with_summary}):
            known = found.get(rank)
            if known is None or (known.summary is None and rank in with_summary):
                read = rank in with_summary and sum(each.summary is not None for each in found.values()) < _MOST_RANKS
                found[rank] = _rank_profile(place, rank, traces.get(rank, []), rank in with_summary, read)
    return [found[rank] for rank in sorted(found)]


def _last_step(trace: str) -> int:
    match = _TRACE.fullmatch(trace)
    return int(match[3] or match[2]) if match else -1


def _rank_profile(place: Artifacts, rank: int, traces: list[str], is_there: bool, read: bool) -> RankProfile:
    if not is_there:
        return RankProfile(rank, traces, None, "It has no summary; the trace alone is there.")
    if not read:
        return RankProfile(rank, traces, None, f"Its summary is among the files of the run; {_MOST_RANKS} are shown.")
    text = place.text(f"{FOLDER}/summary_rank_{rank}.json")
    summary = None if text is None else read_summary(text)
    return RankProfile(rank, traces, summary, "" if summary else "Its summary cannot be read: it may be half written.")


def read_summary(text: str) -> Summary | None:
    """Read a summary as `trace_summary` writes it; None for any other text.

    Args:
        text: content of the file.
    """
    with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
        content = json.loads(text)
        steps = sorted(int(each) for each in content["steps"])
        window, waited = _seconds(content, "window_s"), _seconds(content, "data_wait_s")
        if not steps or not window:
            return None
        parts = {
            "data_wait": waited,
            "copy": _seconds(content, "copy_s"),
            "forward": _seconds(content, "compute_s"),
            "communication": _seconds(content, "exposed_communication_s"),
            "other": max(0.0, _seconds(content, "idle_s") - waited),
        }
        collectives = [_spent(each, "exposed_s") for each in content["collectives"][:_MOST_COLLECTIVES]]
        operators = [_spent(each, "self_s") for each in content["operators"][:_MOST_OPERATORS]]
        return Summary("gpu" if content["device"] == "gpu" else "cpu", steps, window, parts, collectives, operators)
    return None


def _seconds(content: Mapping[str, Any], name: str) -> float:
    seconds = float(content[name])
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name} is {seconds}")
    return seconds


def _spent(content: Mapping[str, Any], name: str) -> Spent:
    shown = shorten(printable(redact_text(str(content["name"])[:4000])), _LONGEST_NAME)
    return Spent(shown, _seconds(content, name), int(content["calls"]))
