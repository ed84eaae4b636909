"""What becomes of the ways in which stock Lightning goes wrong under Azure ML's variables.

Each test is one of them. With the plugin installed it ends in correct training, or within seconds in an error that
says what to type; never in a Trainer that trains alone, and never in a wait for ranks that nobody starts.
"""

from __future__ import annotations

import pytest
from tests.multiprocess.conftest import Job, RunJob

ALL_ROWS = list(range(64))
STOCK = {"AZUREML_STRATEGY_LAUNCH": "off"}


def assert_trained_together(job: Job, world_size: int) -> None:
    assert job.exit_code == 0, job.output
    assert job.each("world_size") == [world_size] * world_size
    assert sorted(row for rows in job.each("read") for row in rows) == ALL_ROWS
    first, *others = job.each("parameters")
    assert all(other == first for other in others)


def assert_refused(job: Job, *words: str) -> None:
    assert job.exit_code == 1
    assert not job.results, "a rank trained"
    for word in ("LaunchError", "strategy='azureml_ddp'", *words):
        assert word in job.output, job.output


def test_one_node_two_processes(run_job: RunJob) -> None:
    job = run_job("fit.py", {"strategy": "ddp", "devices": 2, "num_nodes": 1}, processes_per_node=2)
    assert_trained_together(job, 2)


def test_two_nodes_with_num_nodes(run_job: RunJob) -> None:
    job = run_job("fit.py", {"strategy": "ddp", "devices": 1, "num_nodes": 2}, nodes=2)
    assert_trained_together(job, 2)


@pytest.mark.parametrize("strategy", ["ddp", "auto"])
def test_num_nodes_forgotten_is_refused(run_job: RunJob, strategy: str) -> None:
    job = run_job("fit.py", {"strategy": strategy}, nodes=2, extra=STOCK)
    assert_refused(job, "num_nodes=1", "2 node(s) x 1", "num_nodes=2")


def test_auto_with_one_device_is_refused(run_job: RunJob) -> None:
    """Nobody can tell it from the Trainer with which one rank evaluates alone, until it fits."""
    assert_refused(run_job("fit.py", {"strategy": "auto"}, nodes=2), "num_nodes=1", "2 node(s) x 1")


@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param("ddp_find_unused_parameters_true", marks=pytest.mark.exhaustive), "auto"]
)
def test_num_nodes_forgotten_trains_on_all_nodes(run_job: RunJob, strategy: str) -> None:
    """Without a word of this package; `auto` with several devices is Lightning's `ddp`."""
    arguments = {"plugin": False, "strategy": strategy, **({"devices": 2} if strategy == "auto" else {})}
    job = run_job("fit.py", arguments, nodes=2, processes_per_node=2)
    assert_trained_together(job, 4)
    assert job.each("strategy") == ["AzureMLDDPStrategy"] * 4
    assert "Network: gloo over" in job.output
    if strategy == "ddp":
        in_full = {"strategy": "ddp", "devices": 2, "num_nodes": 2}
        stock = run_job("fit.py", in_full, nodes=2, processes_per_node=2, extra=STOCK)
        assert stock.each("strategy") == ["DDPStrategy"] * 4
        assert job.each("losses") == stock.each("losses")
        assert job.each("parameters") == stock.each("parameters")


def test_another_number_of_nodes_is_refused(run_job: RunJob) -> None:
    job = run_job("fit.py", {"strategy": "ddp", "num_nodes": 3}, nodes=2)
    assert job.exit_code == 1
    assert "Trainer(num_nodes=3), but the job has 2 node(s)" in job.output
    assert not job.results


def test_no_step_begins_with_a_broadcast(run_job: RunJob) -> None:
    """Stock Lightning asks rank 0 in each step whether it got SIGTERM; our callback in a job makes that superfluous."""
    arguments = {"strategy": "ddp", "devices": 1, "num_nodes": 2}
    ours = run_job("fit.py", arguments, nodes=2)
    assert_trained_together(ours, 2)
    assert max(ours.results[0]["broadcasts"], default=0) == 0, "what comes before the first step is not meant"
    stock = run_job("fit.py", arguments, nodes=2, extra={"AZUREML_STRATEGY_CALLBACKS": "off"})
    assert set(stock.results[0]["broadcasts"]) >= set(range(4))


def test_num_nodes_forgotten_trains_with_our_strategy(run_job: RunJob) -> None:
    assert_trained_together(run_job("fit.py", {"strategy": "azureml_ddp"}, nodes=2), 2)


def test_more_devices_than_the_job_started_is_refused(run_job: RunJob) -> None:
    """Stock Lightning waits half an hour for the second rank: LOCAL_RANK makes it think someone starts it."""
    job = run_job("fit.py", {"strategy": "ddp", "devices": 2}, extra=STOCK)
    assert_refused(job, "devices=2", "ranks that nobody starts")


@pytest.mark.parametrize("strategy", ["azureml_ddp", "ddp"])
def test_one_process_per_node_with_two_devices_starts_the_second(run_job: RunJob, strategy: str) -> None:
    assert_trained_together(run_job("fit.py", {"strategy": strategy, "devices": 2}), 2)


@pytest.mark.parametrize("arguments", [{"strategy": "auto"}, {"strategy": "auto", "devices": 1}])
def test_two_processes_with_one_device_is_refused(run_job: RunJob, arguments: dict[str, object]) -> None:
    job = run_job("fit.py", arguments, processes_per_node=2)
    assert_refused(job, "1 node(s) x 2", "would train alone")


def test_node_rank_missing_is_refused_with_stock_ddp(run_job: RunJob) -> None:
    without = ("NODE_RANK",)
    job = run_job("fit.py", {"strategy": "ddp", "devices": 1, "num_nodes": 2}, nodes=2, without=without, extra=STOCK)
    assert_refused(job, "NODE_RANK is not set", "ranks would collide")


def test_node_rank_missing_is_derived_by_our_strategy(run_job: RunJob) -> None:
    job = run_job("fit.py", {"strategy": "azureml_ddp"}, nodes=2, without=("NODE_RANK", "AZUREML_CR_NODE_RANK"))
    assert_trained_together(job, 2)


def test_script_that_never_imports_the_plugin_is_guarded(run_job: RunJob) -> None:
    job = run_job("fit.py", {"plugin": False, "strategy": "auto"}, nodes=2)
    assert_refused(job)


def test_two_nodes_without_distribution_block_is_refused(run_job: RunJob) -> None:
    job = run_job("fit.py", {"strategy": "azureml_ddp"}, nodes=2, distribution="none")
    assert job.exit_code == 1
    assert "distribution: {type: pytorch" in job.output
    assert not job.results


@pytest.mark.parametrize(
    "strategies",
    [["ddp_fork", "ddp_notebook"], pytest.param(["ddp_spawn", "ddp_fork"], marks=pytest.mark.exhaustive)],
)
def test_multiprocessing_starts_the_ranks_of_one_node(run_job: RunJob, strategies: list[str]) -> None:
    """Notebooks have no other way; a job of one process a node leaves the others to Lightning.

    A process that is spawned gets the Trainer by pickle, which tests/test_plugin.py tries, and imports all anew.
    """
    job = run_job("multiprocessing_launchers.py", *strategies)
    assert job.exit_code == 0, job.output
    assert sorted(job.results) == [0, 1, 10, 11]
    for place in range(len(strategies)):
        first, second = (job.results[10 * place + rank] for rank in (0, 1))
        assert first["world_size"] == second["world_size"] == 2
        assert sorted(first["read"] + second["read"]) == ALL_ROWS, "each row once"
        assert first["parameters"] == second["parameters"]
        assert {"LaunchGuard", "HangWatch", "TerminateTogether", "NetworkRecorder"} <= set(second["callbacks"])
    assert "Nobody watches" not in job.output
    assert "has failed" not in job.output


def test_multiprocessing_beside_the_platforms_own_processes_is_refused(run_job: RunJob) -> None:
    """Each of the node's two processes would start two more, which collide."""
    job = run_job("multiprocessing_launchers.py", "ddp_fork", processes_per_node=2)
    assert_refused(job, "starts 2 processes", "2 process(es) on each node")


def test_rank_0_tests_alone_after_training(run_job: RunJob) -> None:
    arguments = {"strategy": "ddp", "devices": 1, "num_nodes": 2, "tested": True}
    job = run_job("fit.py", arguments, nodes=2)
    assert_trained_together(job, 2)
    assert job.each("tested") == [len(ALL_ROWS), 0]


def test_guard_can_be_switched_off(run_job: RunJob) -> None:
    job = run_job("fit.py", {"strategy": "auto"}, processes_per_node=2, extra={"AZUREML_STRATEGY_GUARD": "off"})
    assert job.exit_code == 0, job.output
    assert job.each("world_size") == [1]  # both report as rank 0 of 1
