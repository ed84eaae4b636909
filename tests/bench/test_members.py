"""Joining the job, and leaving it; groups of several processes are in tests/multiprocess."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch.distributed as dist
from tests.emulated import free_port

from azureml_strategy.bench import BenchError, BenchOptions, run_bench
from azureml_strategy.bench.run import join, require_launch
from azureml_strategy.cluster import Launch

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")  # else it would be set for this process
    return Launch("pytorch", 0, 1, 0, 1, 0, 1, "127.0.0.1", free_port())


def test_outside_a_job_there_is_nobody_to_talk_to() -> None:
    with pytest.raises(BenchError, match=r"no process of a job\. .* azureml-strategy emulate --nodes 2 -- azureml-str"):
        run_bench(BenchOptions())


def test_a_job_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "NODE_RANK": "0", "AZUREML_NODE_COUNT": "1"}
    for name, value in {**variables, "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105", "AZUREML_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BenchError, match="this job has one process"):
        require_launch()


def test_the_group_ends_with_the_block(launch: Launch) -> None:
    with join(launch, "gloo", TIMEOUT) as member:
        assert dist.get_world_size() == 1
        assert member.place.device.type == "cpu"
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert member.largest_message() == pytest.approx(0.4 * memory, rel=0.01)
        assert member.idle_gpus == 0
    assert not dist.is_initialized()


def test_it_ends_after_an_error_too(launch: Launch) -> None:
    with pytest.raises(ZeroDivisionError), join(launch, "gloo", TIMEOUT):
        raise ZeroDivisionError
    assert not dist.is_initialized()


def test_nccl_without_a_gpu(launch: Launch) -> None:
    with pytest.raises(BenchError, match="no GPU of its own: 0 can be seen"), join(launch, "nccl", TIMEOUT):
        pass
    assert not dist.is_initialized()
