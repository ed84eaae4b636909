from __future__ import annotations

from tests.watching.reports import collective, report

from azureml_strategy.watching.culprits import disagreement, held_up_by


def test_the_rank_that_has_not_come() -> None:
    waiting = report(collective(41))
    assert held_up_by({0: waiting, 1: report(collective(40, over=True)), 2: waiting, 3: waiting}) == [1]


def test_the_end_of_a_chain_over_two_groups() -> None:
    """Rank 1 waits for rank 3 in one group, and the others for rank 1 in another."""
    pair = {"group": "5", "ranks": (1, 3)}
    reports = {
        0: report(collective(41)),
        1: report(collective(40, over=True), collective(8, **pair)),
        2: report(collective(41)),
        3: report(collective(40, over=True), collective(7, over=True, **pair)),
    }
    assert held_up_by(reports) == [3]


def test_one_that_is_ahead_waits_for_those_behind_only() -> None:
    """Entered in advance, as NCCL does it: the first that is not over is shown, and the newest counted."""
    ahead, behind = report(collective(41, newest=44)), report(collective(43, newest=43))
    silent = report(collective(40, over=True))
    assert held_up_by({0: ahead, 1: behind, 2: silent, 3: ahead}) == [2]


def test_without_a_recorder_those_outside_of_a_collective() -> None:
    inside, outside = report(communicates=True), report()
    assert held_up_by({0: inside, 1: outside, 2: inside}) == [1]


def test_nobody_is_blamed_without_a_sign() -> None:
    assert held_up_by({0: report(), 1: report()}) == []
    assert held_up_by({0: report(communicates=True), 1: report(communicates=True)}) == []
    assert held_up_by({}) == []


def test_ranks_in_different_collectives() -> None:
    reports = {0: report(collective(41)), 1: report(collective(41, operation="broadcast"))}
    assert disagreement(reports) == (
        "rank 0 is in all_reduce #41 of 3.2 MB, but rank 1 in broadcast #41 of 3.2 MB: each waits for the other"
    )
    sizes = {0: report(collective(41)), 1: report(collective(41, size_bytes=4))}
    assert "all_reduce #41 of 4 B" in str(disagreement(sizes))


def test_uneven_parts_are_no_disagreement() -> None:
    gathers = [collective(41, operation="all_gather", size_bytes=size) for size in (4, 8)]
    assert disagreement(dict(enumerate(map(report, gathers)))) is None
