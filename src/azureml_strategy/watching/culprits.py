"""Which ranks hold up the others, by what each says of itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from azureml_strategy.watching.recorder import Collective
from azureml_strategy.watching.report import Report

# Ranks must agree on the size of these, whatever else they send.
_SAME_SIZE = ("all_reduce", "broadcast", "reduce")


def held_up_by(reports: Mapping[int, Report]) -> list[int]:
    """The ranks that others wait for and that wait for nobody; none if that cannot be told.

    A rank waits for those that have not entered the collective that it is in. Where ranks wait in several groups, for
    one another, the end of each chain is meant. Without a flight recorder, as for gloo's messages between two ranks,
    the ranks are meant whose Python is outside of a collective while others are inside.

    Args:
        reports: of all ranks that gave one.
    """
    waits = {rank: set(_awaited(rank, reports)) for rank in reports}
    awaited = set().union(*waits.values()) if waits else set()
    ends = sorted(rank for rank in awaited if not waits.get(rank))
    if ends:
        return ends
    outside = [rank for rank, report in reports.items() if not report.communicates and report.waits_in is None]
    return sorted(outside) if len(outside) < len(reports) else []


def disagreement(reports: Mapping[int, Report]) -> str | None:
    """Two ranks that are in the same place of a group's order, but not in the same collective.

    Args:
        reports: of all ranks that gave one.
    """
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


def _awaited(rank: int, reports: Mapping[int, Report]) -> Iterator[int]:
    for each in reports[rank].collectives:
        if each.over:
            continue
        for other in each.ranks:
            if other != rank and _entered(reports.get(other), each.group) < each.number:
                yield other


def _entered(report: Report | None, group: str) -> int:
    """The number of the newest collective in the group; 0 for none."""
    found = (each.newest for each in (report.collectives if report else ()) if each.group == group)
    return max(found, default=0)
