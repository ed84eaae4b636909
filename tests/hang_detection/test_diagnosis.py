from __future__ import annotations

import pytest
from tests.hang_detection.reports import collective, heartbeat, report

from azureml_strategy.control.process import Member
from azureml_strategy.hang_detection.diagnosis import Evidence, disagreement, held_up_by, reach_verdict
from azureml_strategy.hang_detection.peers import Alarm, Kind, Report


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


MEMBERS = {rank: Member(rank, rank // 2, f"gpu-{rank // 2}", "table", 10 + rank, "1") for rank in range(4)}


def evidence(kind: Kind, ranks: tuple[int, ...], text: str, reports: dict[int, Report]) -> Evidence:
    return Evidence(Alarm(kind, ranks, text), MEMBERS, {rank: heartbeat() for rank in range(4)}, reports, 4)


def test_a_stall_names_rank_node_host_place_and_collectives() -> None:
    waiting = report(collective(41))
    reports = {0: waiting, 1: waiting, 2: report(collective(40, over=True)), 3: waiting}
    verdict = reach_verdict(evidence("stalled", (), "for 600 s", reports))
    assert verdict.headline == (
        "rank 2 (node 1, host gpu-1) holds up the others, which have done nothing for 600 s. It was in step 7 "
        "(training) at /home/me/train.py:30 in __getitem__. Its last collective: all_reduce #40 of 3.2 MB. 3 rank(s) "
        "wait for it, rank 0 in all_reduce #41 of 3.2 MB since 22:14:01 UTC."
    )
    assert not verdict.final, "it may go on"
    lines = verdict.text.splitlines()
    assert lines[3].startswith("-> rank 2 (node 1, host gpu-1): step 7, training, idle for 9 s; last collective")
    assert lines[1].startswith("   rank 0 (node 0, host gpu-0): step 7, training, idle for 9 s; in all_reduce #41")


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("gone", "", "is gone: its process was killed"),
        ("silent", "for 120 s: its process 77 is alive", "has not been heard of for 120 s: its process 77 is alive."),
        ("vanished", "its machine does not answer", "is gone with its node: its machine does not answer."),
        ("lost", "", "is gone: a connection to it has ended"),
        ("unserved", "it", "is gone: the rendezvous store, which it serves, has ended"),
    ],
)
def test_a_rank_that_gives_no_report_is_told_by_its_last_sign(kind: Kind, text: str, said: str) -> None:
    waiting = report(collective(41))
    verdict = reach_verdict(evidence(kind, (3,), text, {0: waiting, 1: waiting, 2: waiting}))
    assert verdict.headline.startswith(f"rank 3 (node 1, host gpu-1) {said}")
    assert "It was last heard of at 22:13:20 UTC in step 7 (training), 40 operations entered in group 0." in (
        verdict.headline
    )
    assert "-> rank 3 (node 1, host gpu-1): no answer; last heard of" in verdict.text
    assert verdict.final is (kind != "silent")


def test_a_rank_that_does_not_answer_the_alarm_is_the_one() -> None:
    waiting = report(collective(41))
    verdict = reach_verdict(evidence("stalled", (), "for 600 s", {0: waiting, 2: waiting, 3: waiting}))
    assert verdict.headline.startswith("rank 1 (node 0, host gpu-0) holds up the others")


def test_ranks_that_disagree_are_all_named() -> None:
    reports = {rank: report(collective(41, operation="all_reduce" if rank else "broadcast")) for rank in range(4)}
    verdict = reach_verdict(evidence("stalled", (), "for 600 s", reports))
    assert verdict.headline.startswith("The ranks hang for 600 s: rank 0 is in broadcast #41 of 3.2 MB, but rank 1 in")
    assert verdict.final, "it can never resolve by itself"


def test_a_disagreement_counts_more_than_a_rank_that_has_not_come() -> None:
    reports = {rank: report(collective(41, operation="all_reduce" if rank else "broadcast")) for rank in range(3)}
    verdict = reach_verdict(evidence("stalled", (), "for 600 s", reports | {3: report(collective(40, over=True))}))
    assert "rank 0 is in broadcast #41" in verdict.headline
    assert verdict.final


@pytest.mark.parametrize("told", ["ValueError: no labels", "ValueError: no labels."])
def test_an_exception_is_told_with_its_rank(told: str) -> None:
    reports = {rank: report(collective(41), failed=True) for rank in range(4)}
    verdict = reach_verdict(evidence("ended", (1,), told, reports))
    assert verdict.headline.startswith("rank 1 (node 0, host gpu-0) ended first: ValueError: no labels. ")
    assert verdict.kind == "ended"
