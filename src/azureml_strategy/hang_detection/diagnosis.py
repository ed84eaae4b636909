"""Diagnoses a hang from the ranks' reports: finds the ranks that hold up the others, and writes the log message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from azureml_strategy.control.process import Member
from azureml_strategy.hang_detection.flight_recorder import Collective
from azureml_strategy.hang_detection.main_thread import lines
from azureml_strategy.hang_detection.peers import PASSING, Alarm, Heartbeat, Kind, Report

# All ranks must use the same size in these; in other collectives sizes may differ.
_SAME_SIZE = ("all_reduce", "broadcast", "reduce")

_MOST_RANKS = 64  # a table of a thousand ranks is unreadable


def held_up_by(reports: Mapping[int, Report]) -> list[int]:
    """Return the ranks that others wait for and that wait for no other rank; empty if that is unknown.

    A rank waits for the ranks that have not entered its current collective. If such waits form chains over several
    groups, the result is the end of each chain. Without flight recorder data, as for gloo's messages between two ranks,
    the result is the ranks whose Python code is outside of a collective while other ranks are inside one.
    """
    waits = {rank: set(_ranks_waited_for(rank, reports)) for rank in reports}
    awaited = set().union(*waits.values()) if waits else set()
    ends = sorted(rank for rank in awaited if not waits.get(rank))
    if ends:
        return ends
    outside = [rank for rank, report in reports.items() if not report.communicates and report.waits_in is None]
    return sorted(outside) if len(outside) < len(reports) else []


def disagreement(reports: Mapping[int, Report]) -> str | None:
    """Describe two ranks that are at the same position in a group's order, but in different collectives; or None."""
    first: dict[tuple[str, int], tuple[int, Collective]] = {}
    entered = [(rank, each) for rank, report in sorted(reports.items()) for each in report.collectives]
    for rank, each in entered:
        if each.over or not each.ranks:
            continue
        other_rank, other = first.setdefault((each.group, each.number), (rank, each))
        same_size = each.size_bytes == other.size_bytes or each.operation not in _SAME_SIZE
        if each.operation != other.operation or not same_size:
            return f"rank {other_rank} is in {other}, but rank {rank} in {each}: each waits for the other"
    return None


def _ranks_waited_for(rank: int, reports: Mapping[int, Report]) -> Iterator[int]:
    for each in reports[rank].collectives:
        if each.over:
            continue
        for other in each.ranks:
            if other != rank and _newest_entered(reports.get(other), each.group) < each.number:
                yield other


def _newest_entered(report: Report | None, group: str) -> int:
    """Return the number of the newest collective that the rank has entered in the group; 0 for none."""
    found = (each.newest for each in (report.collectives if report else ()) if each.group == group)
    return max(found, default=0)


@dataclass(frozen=True)
class Verdict:
    """Which ranks the others wait for, and why.

    Attributes:
        kind: what has happened.
        headline: one sentence or more, with rank, node and host.
        text: the headline, and where each rank is.
        final: whether the hang can never resolve by itself: a process is gone, or ranks are in different collectives.
    """

    kind: Kind
    headline: str
    text: str
    final: bool


@dataclass(frozen=True)
class Evidence:
    """What is known about an alarm, of each rank.

    `members` lacks ranks that never joined, `heartbeats` those that never sent one, and `reports` those that did not
    answer the alarm.
    """

    alarm: Alarm
    members: Mapping[int, Member]
    heartbeats: Mapping[int, Heartbeat]
    reports: Mapping[int, Report]
    world_size: int

    def name(self, rank: int) -> str:
        """Return rank, node and host as text."""
        return str(self.members.get(rank, f"rank {rank}"))


def reach_verdict(evidence: Evidence) -> Verdict:
    """Find the ranks that the others wait for, and describe where each rank is."""
    alarm = evidence.alarm
    mismatch = disagreement(evidence.reports) if alarm.kind == "stalled" else None
    found = [] if mismatch else list(alarm.ranks)
    if not found and not mismatch:
        left = {rank for rank, heartbeat in evidence.heartbeats.items() if heartbeat.over}
        found = [rank for rank in range(evidence.world_size) if rank not in evidence.reports and rank not in left]
    if not found and not mismatch and alarm.kind == "stalled":
        found = held_up_by(evidence.reports)
    headline = _headline(evidence, found, mismatch)
    text = "\n".join([headline, *_table(evidence, found), *_stacks(evidence, found)])
    return Verdict(alarm.kind, headline, text, alarm.kind not in PASSING or mismatch is not None)


def _headline(evidence: Evidence, found: list[int], mismatch: str | None) -> str:
    alarm = evidence.alarm
    if not found:
        why = mismatch or "which rank the others wait for cannot be told"
        return f"The ranks hang {alarm.text}: {why}." if alarm.kind == "stalled" else f"{alarm.text}."
    names = ", ".join(map(evidence.name, found))
    what = {
        "ended": f"ended first: {alarm.text.rstrip('.')}",
        "gone": "is gone: its process was killed (by SIGKILL, or for want of memory) or has crashed",
        "silent": f"has not been heard of {alarm.text}",
        "vanished": f"is gone with its node: {alarm.text}",
        "stalled": f"holds up the others, which have done nothing {alarm.text}",
        "unserved": f"is gone: the rendezvous store, which {alarm.text} serves, has ended",
        "lost": "is gone: a connection to it has ended, and nothing was heard of it since",
    }[alarm.kind]
    return f"{names} {what}. {' '.join(_where_it_was(evidence, found))}".rstrip()


def _where_it_was(evidence: Evidence, found: list[int]) -> Iterator[str]:
    """Yield sentences: where the first rank found was, and where the others wait for it."""
    report, heartbeat = evidence.reports.get(found[0]), evidence.heartbeats.get(found[0])
    heartbeat = report.heartbeat if report else heartbeat
    if heartbeat is None:
        yield "Nothing was heard of it."
        return
    if report is None:
        yield f"It was {_last_heartbeat(heartbeat)}."
    else:
        where = "" if report.failed else f" at {report.place}"
        yield f"It was in step {heartbeat.step} ({heartbeat.phase}){where}."
        if report.last:
            yield f"Its last collective: {report.last}."
    others = sorted(rank for rank in evidence.reports if rank not in found)
    waiting = [(rank, held) for rank in others if (held := evidence.reports[rank].waits_in)]
    if waiting:
        rank, collective = waiting[0]
        since = f"since {_clock(collective.entered_at)}{_called_at(collective.place)}"
        yield f"{len(waiting)} rank(s) wait for it, rank {rank} in {collective} {since}."


def _table(evidence: Evidence, found: list[int]) -> Iterator[str]:
    ranks = sorted({*found, *range(min(evidence.world_size, _MOST_RANKS))})
    for rank in ranks:
        mark = "->" if rank in found else "  "
        yield f"{mark} {evidence.name(rank)}: {_state(evidence, rank)}"
    if evidence.world_size > _MOST_RANKS:
        yield f"   ... {evidence.world_size} ranks in all"


def _state(evidence: Evidence, rank: int) -> str:
    report, heartbeat = evidence.reports.get(rank), evidence.heartbeats.get(rank)
    if report is None:
        return f"no answer; {_last_heartbeat(heartbeat)}" if heartbeat else "never heard of"
    parts = [f"step {report.heartbeat.step}, {report.heartbeat.phase}, idle for {report.heartbeat.idle_s:.0f} s"]
    if report.waits_in:
        parts.append(
            f"in {report.waits_in} since {_clock(report.waits_in.entered_at)}{_called_at(report.waits_in.place)}"
        )
    elif report.last:
        parts.append(f"last collective {report.last}, complete")
    parts.append("its exception is in its log" if report.failed else f"at {report.place}")
    return "; ".join(parts)


def _last_heartbeat(heartbeat: Heartbeat) -> str:
    entered = "".join(f", {count} operations entered in group {group}" for group, count in heartbeat.entered.items())
    left = "left in order" if heartbeat.over else "last heard of"
    return f"{left} at {_clock(heartbeat.at)} in step {heartbeat.step} ({heartbeat.phase}){entered}"


def _stacks(evidence: Evidence, found: list[int]) -> Iterator[str]:
    for rank in found:
        report = evidence.reports.get(rank)
        if report and report.stack and not report.failed:
            yield f"Innermost frames of {evidence.name(rank)}:"
            yield from (f"     {text}" for text in lines(report.stack))


def _called_at(place: str) -> str:
    return f", called at {place}" if place else ""


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S UTC")
