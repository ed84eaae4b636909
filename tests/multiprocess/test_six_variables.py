"""Jobs with the six variables that Azure ML's own page lists, and no others: nothing says how many nodes there are."""

from __future__ import annotations

from typing import Any

import pytest
from tests.multiprocess.conftest import Job, RunJob
from tests.multiprocess.test_stock_lightning_rows import assert_refused, assert_trained_together

SCRIPT = "six_variables.py"
OURS = {"strategy": "azureml_ddp"}


EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.parametrize(("nodes", "processes"), [(2, 2), pytest.param(3, 1, marks=EXHAUSTIVE), (1, 2)])
def test_the_numbers_are_those_of_the_full_environment(run_job: RunJob, nodes: int, processes: int) -> None:
    full = run_job("fit.py", OURS, nodes=nodes, processes_per_node=processes)
    assert full.exit_code == 0, full.output
    job = run_job(SCRIPT, OURS, nodes=nodes, processes_per_node=processes, documented=True)
    assert job.exit_code == 0, job.output
    for key in ("world_size", "num_nodes", "losses", "read", "parameters"):
        assert job.each(key) == full.each(key)
    assert job.each("nodes") == [str(nodes)] * (nodes * processes), "for later readers and child processes"
    assert job.each("place") == list(range(nodes * processes))


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"strategy": "ddp", "devices": 1, "num_nodes": 2}, marks=EXHAUSTIVE, id="a stock strategy"),
        pytest.param(
            {"strategy": "ddp", "devices": 1, "num_nodes": 2, "plugin": True},
            marks=EXHAUSTIVE,
            id="with our environment",
        ),
        pytest.param({**OURS, "group": True}, id="the script has started the group itself"),
    ],
)
def test_other_ways_to_train(run_job: RunJob, arguments: dict[str, Any]) -> None:
    job = run_job(SCRIPT, arguments, nodes=2, documented=True)
    assert_trained_together(job, 2)
    assert job.each("nodes") == ["2", "2"]


@pytest.mark.exhaustive
def test_one_process_a_node_starts_the_others_and_trains_twice(run_job: RunJob) -> None:
    job = run_job("fit.py", {**OURS, "devices": 2, "again": True}, nodes=2, documented=True)
    assert_trained_together(job, 4)


def test_a_stock_trainer_that_forgets_num_nodes_is_refused(run_job: RunJob) -> None:
    lightnings_own = {"AZUREML_STRATEGY_LAUNCH": "off"}
    job = run_job("fit.py", {"plugin": False, "strategy": "ddp"}, nodes=2, documented=True, extra=lightnings_own)
    assert_refused(job, "num_nodes=1", "2 node(s) x 1", "num_nodes=2")


@pytest.mark.exhaustive
def test_multiprocessing_over_two_nodes(run_job: RunJob) -> None:
    """The first process of each node asks; rank 0's port is free for the child process that becomes rank 0."""
    job = run_job("multiprocessing_launchers.py", "ddp_spawn", "ddp_fork", "num_nodes=2", nodes=2, documented=True)
    assert job.exit_code == 0, job.output
    for place in (0, 10):
        ranks = [job.results[place + rank] for rank in range(4)]
        assert [rank["world_size"] for rank in ranks] == [4] * 4
        assert len({tuple(rank["parameters"]) for rank in ranks}) == 1
        assert sorted(row for rank in ranks for row in rank["read"]) == list(range(64))


def test_rank_0_tests_alone(run_job: RunJob) -> None:
    """Nobody else makes a Trainer, and none is waited for."""
    job = run_job(SCRIPT, {"alone": True}, nodes=2, documented=True)
    assert job.exit_code == 0, job.output
    assert [len(rows) for rows in job.each("read")] == [64, 0]
    assert job.each("nodes") == [None, None]


def errors(job: Job) -> list[str]:
    assert job.exit_code == 0, job.output
    return [result["error"] for _, result in sorted(job.results.items())]


def test_a_missing_rank_is_named_on_all_that_came(run_job: RunJob) -> None:
    job = run_job(SCRIPT, {"timeout_s": 5, "absent": [3]}, nodes=2, processes_per_node=2, documented=True)
    first, *others = errors(job)
    assert others == [first, first]
    assert "only 3 of 4 ranks came to 127.0.2.1:" in first
    assert "within 0:00:05 to tell where they are. Missing: rank 3. Look at their logs" in first
    assert first.endswith("set AZUREML_NODE_COUNT to the job's `resources.instance_count`.")


def test_a_missing_rank_0_is_named(run_job: RunJob) -> None:
    (error,) = errors(run_job(SCRIPT, {"timeout_s": 3, "absent": [0]}, nodes=2, documented=True))
    assert "found no rank 0 at 127.0.2.1:" in error


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        pytest.param(
            {2: {"NODE_RANK": "0", "LOCAL_RANK": "2"}, 3: {"LOCAL_RANK": "0"}},
            (
                "NODE_RANK 0: ranks 0 to 2 of 4 (LOCAL_RANK 0, 1, 2) on ",
                "; NODE_RANK 1: rank 3 of 4 (LOCAL_RANK 0) on ",
            ),
            id="nodes of three and one",
        ),
        pytest.param(
            {2: {"NODE_RANK": "0"}, 3: {"NODE_RANK": "0"}},
            ("NODE_RANK 0: ranks 0 to 3 of 4 (LOCAL_RANK 0, 1, 0, 1) on ",),
            id="both nodes are node 0",
        ),
        pytest.param(
            {2: {"NODE_RANK": "2"}, 3: {"NODE_RANK": "2"}},
            ("NODE_RANK 2: ranks 2, 3 of 4 (LOCAL",),
            marks=EXHAUSTIVE,
            id="no node 1",
        ),
        pytest.param(
            {3: {"RANK": "2"}}, ("NODE_RANK 1: ranks 2, 2 of 4 (LOCAL_RANK ",), marks=EXHAUSTIVE, id="a rank twice"
        ),
        pytest.param(
            {1: {"NODE_RANK": ""}}, ("NODE_RANK not set: rank 1 of 4",), marks=EXHAUSTIVE, id="a rank without a node"
        ),
        pytest.param(
            {3: {"WORLD_SIZE": "5"}},
            ("NODE_RANK 1: ranks 2, 3 of 4, 5 (LOCAL",),
            marks=EXHAUSTIVE,
            id="two world sizes",
        ),
    ],
)
def test_places_that_contradict_one_another(
    run_job: RunJob, environ: dict[int, dict[str, str]], words: tuple[str, ...]
) -> None:
    job = run_job(SCRIPT, {**OURS, "environ": environ}, nodes=2, processes_per_node=2, documented=True)
    told = errors(job)
    assert len(told) == 4
    assert len(set(told)) == 1
    for word in (*words, "Every node must have the same number of processes", "AZUREML_NODE_COUNT"):
        assert word in told[0]
