"""azureml_ddp on two emulated nodes: the same numbers as Lightning's DDP and as one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.multiprocess.conftest import SCRIPTS, Job, RunJob

EPOCHS, BATCH = 6, 8


def assert_equal_on_all_ranks(job: Job, *path: str) -> None:
    values: list[Any] = [job.results[rank] for rank in (0, 1)]
    for key in path:
        values = [value[key] for value in values]
    assert values[0] == values[1]


@pytest.mark.parametrize("nodes", [1, 2])
def test_features_give_the_numbers_of_stock_ddp(run_job: RunJob, nodes: int) -> None:
    job = run_job("ddp_features.py", "features", nodes=nodes)
    assert job.exit_code == 0, job.output
    for name, (ours, stock) in job.results[0].items():
        assert ours["losses"] == stock["losses"], name
        assert ours["parameters"] == stock["parameters"], name
        assert sum(ours["losses"][-4:]) < sum(ours["losses"][:4]), name
        assert (ours["views"], stock["views"]) == (True, False)
        assert job.results[nodes - 1][name][0]["parameters"] == ours["parameters"], name
    assert_losses_of_one_process([each[0] for each in job.each("plain")])


def assert_losses_of_one_process(ranks: list[dict[str, Any]]) -> None:
    """The mean loss of the ranks is the loss of one process that reads all ranks' rows in one batch."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        from common import Regression, Rows
    finally:
        sys.path.remove(str(SCRIPTS))
    model, rows = Regression(), Rows().rows
    optimizer = model.configure_optimizers()
    expected = []
    for step in range(EPOCHS * len(rows) // (len(ranks) * BATCH)):
        read = [row for rank in ranks for row in rank["read"][step * BATCH : (step + 1) * BATCH]]
        loss = model._loss((rows[read], torch.tensor(read)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    mean = [sum(losses) / len(ranks) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert mean == pytest.approx(expected, rel=1e-5)


def test_gradient_compression_works_on_the_cpu(run_job: RunJob) -> None:
    """Stock Lightning never calls a hook on the CPU: losses would be those of exact gradients, to the last bit."""
    job = run_job("ddp_features.py", "compressions", nodes=2)
    assert job.exit_code == 0, job.output
    exact = job.results[0]["none"]["losses"]
    for name in ("bf16", "fp16", "powersgd"):
        assert_equal_on_all_ranks(job, name, "parameters")
        losses = job.results[0][name]["losses"]
        assert losses != exact, name
        # PowerSGD starts with ten exact steps; halved gradients stay close all the way.
        steps, tolerance = (10, 1e-4) if name == "powersgd" else (len(exact), 0.1)
        assert losses[:steps] == pytest.approx(exact[:steps], rel=tolerance), name
        assert sum(losses[-4:]) < sum(losses[:4]), name
    assert job.results[0]["powersgd"]["error_feedback"] > 0


def test_powersgd_says_that_it_begins_anew(run_job: RunJob) -> None:
    """Its errors are in no checkpoint, and those of a state that was kept belong to other buckets."""
    job = run_job("ddp_features.py", "begun_anew", nodes=2)
    assert job.exit_code == 0, job.output
    assert job.each("steps") == [[3, 3]] * 2
    assert job.output.count("PowerSGD goes on from step ") == 1
    assert "PowerSGD goes on from step 3 without what the ranks had not sent" in job.output
    (told,), silent = job.each("told")
    assert "has sent the gradients of 3 steps" in told
    assert not silent


@pytest.mark.parametrize("nodes", [1, 2])
def test_validate_test_predict(run_job: RunJob, nodes: int) -> None:
    job = run_job("ddp_features.py", "evaluations", nodes=nodes)
    assert job.exit_code == 0, job.output
    ours = job.results[0]
    assert ours["validate"] == job.results[nodes - 1]["validate"]
    assert ours["validate"][0]["val_loss"] == ours["test"][0]["val_loss"]
    predicted = [value for of_ranks in zip(*job.each("predict"), strict=True) for value in of_ranks]
    assert len(predicted) == 64


@pytest.mark.cuda(gpus=2)  # torch's SyncBatchNorm runs on GPUs only
def test_sync_batchnorm(run_job: RunJob) -> None:
    job = run_job("ddp_features.py", "sync_batchnorm", nodes=2)
    assert job.exit_code == 0, job.output
    assert_equal_on_all_ranks(job, "sync_batchnorm", "parameters")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_compiled_module(run_job: RunJob, backend: str) -> None:
    """Dynamo cuts the graph where DDP reduces; what a backend makes of the parts is its own."""
    job = run_job("ddp_features.py", "compiled", backend, nodes=2)
    assert job.exit_code == 0, job.output
    assert_equal_on_all_ranks(job, "parameters")
    assert job.results[0]["losses"] == pytest.approx(job.results[0]["eager_losses"], rel=1e-4)


@pytest.mark.parametrize(
    "distribution",
    ["pytorch", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("mpi", "tensorflow"))],
)
def test_one_process_per_node_starts_the_others_with_their_ranks(run_job: RunJob, distribution: str) -> None:
    arguments = {"strategy": "azureml_ddp", "devices": 2, "again": distribution == "pytorch"}
    job = run_job("fit.py", arguments, nodes=2, distribution=distribution)
    assert job.exit_code == 0, job.output
    assert job.each("world_size") == [4] * 4
    assert [environ["RANK"] for environ in job.each("environ")] == ["0", "1", "2", "3"]
    assert [environ["NODE_RANK"] for environ in job.each("environ")] == ["0", "0", "1", "1"]
    assert sorted(row for rows in job.each("read") for row in rows) == list(range(64))


def test_each_process_parses_its_variables_once_and_those_that_a_strategy_changes_again(run_job: RunJob) -> None:
    job = run_job("places.py", nodes=2)
    assert job.exit_code == 0, job.output
    node, place = {"of": 2, "local": 0, "parsed": 1}, {"of": 4, "parsed": 1}
    for rank, told in job.results.items():
        started = rank % 2 == 1
        here = {**place, "rank": rank, "local": rank % 2}
        assert told["constructed"] == (here if started else {**node, "rank": rank // 2})
        assert told["trained"] == (here if started else {**here, "parsed": 2})
    assert sorted(job.results) == [0, 1, 2, 3]


@pytest.mark.parametrize("distribution", ["mpi", pytest.param("tensorflow", marks=pytest.mark.exhaustive)])
def test_two_processes_on_each_of_two_nodes(run_job: RunJob, distribution: str) -> None:
    arguments = {"strategy": "azureml_ddp"}
    job = run_job("fit.py", arguments, nodes=2, processes_per_node=2, distribution=distribution)
    assert job.exit_code == 0, job.output
    assert job.each("world_size") == [4] * 4
    assert sorted(row for rows in job.each("read") for row in rows) == list(range(64))


def test_outside_a_job_devices_start_processes_as_in_lightning(run_job: RunJob, tmp_path: Path) -> None:
    job = run_job("fit.py", {"strategy": "azureml_ddp", "devices": 2}, in_job=False)
    assert job.exit_code == 0, job.output
    assert job.each("world_size") == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_nodes": 3}, ("num_nodes=3", "2 node(s)", "resources.instance_count")),
        ({"devices": 3}, ("devices=3", "started 2 processes on each node", "process_count_per_instance")),
    ],
)
def test_contradictions_name_both_numbers(run_job: RunJob, arguments: dict[str, int], words: tuple[str, ...]) -> None:
    job = run_job("fit.py", {"strategy": "azureml_ddp", **arguments}, nodes=2, processes_per_node=2)
    assert job.exit_code == 1
    assert not job.results
    for word in words:
        assert word in job.output
