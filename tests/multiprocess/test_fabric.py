"""Fabric on two emulated nodes of two processes: the numbers of Fabric's own DDP and of one process."""

from __future__ import annotations

from typing import Any

import pytest
from tests.multiprocess.conftest import RunJob

ON_CPU = {"DS_ACCELERATOR": "cpu"}
PLAIN = ("azureml_ddp", "ddp", "azureml_model_parallel", "tensor")
ZERO = tuple(f"azureml_deepspeed{end}" for end in ("", "_stage_1", "_stage_3", "_stage_3_offload"))


@pytest.mark.parametrize("names", [PLAIN, pytest.param(ZERO, marks=pytest.mark.slow)], ids=["DDP and FSDP2", "ZeRO"])
def test_losses_and_outputs_are_those_of_stock_ddp_and_of_one_process(run_job: RunJob, names: tuple[str, ...]) -> None:
    job = run_job("fabric.py", 4, "stock", *names, nodes=2, processes_per_node=2, extra=ON_CPU)
    assert job.exit_code == 0, job.output
    alone = run_job("fabric.py", 4, "auto", in_job=False)
    assert alone.exit_code == 0, alone.output
    one = alone.results[0]["auto"]
    check_one_process(run_job, [name for name in names if name != "tensor"], one)
    for name in ("stock", *names):
        ranks = job.each(name)
        assert [each["world_size"] for each in ranks] == [4] * 4
        assert [each["rank"] for each in ranks] == [0, 1, 2, 3]
        for each in ranks:
            assert each["losses"] == pytest.approx(one["losses"], rel=1e-4), name
            assert each["check"] == pytest.approx(one["check"], rel=1e-3), name
    first = job.results[0]
    for name in {"azureml_ddp", "ddp"} & set(names):
        assert first[name]["strategy"] == "FabricDDPStrategy"
        assert first[name]["losses"] == first["stock"]["losses"], "to the last bit"
        assert first[name]["check"] == first["stock"]["check"]


def check_one_process(run_job: RunJob, names: list[str], expected: dict[str, Any]) -> None:
    """One process of a job, which reads the rows of all four."""
    job = run_job("fabric.py", 4, *names, extra=ON_CPU)
    assert job.exit_code == 0, job.output
    for name in names:
        found = job.results[0][name]
        assert found["world_size"] == 1
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5), name
        assert found["check"] == pytest.approx(expected["check"], rel=1e-4), name


def test_one_process_a_node_starts_the_others(run_job: RunJob) -> None:
    job = run_job("fabric_devices.py", nodes=2)
    assert job.exit_code == 0, job.output
    assert job.each("world_size") == [4] * 4
    assert job.each("given") == ["as typed"] * 4


def test_on_a_laptop_names_give_lightnings_own(run_job: RunJob) -> None:
    job = run_job("fabric.py", 4, "ddp", "azureml_ddp", "auto", in_job=False)
    assert job.exit_code == 0, job.output
    (only,) = job.results.values()
    assert [only[name]["strategy"] for name in ("ddp", "azureml_ddp", "auto")] == [
        *("DDPStrategy", "FabricDDPStrategy", "SingleDeviceStrategy"),
    ]
    assert only["ddp"]["losses"] == only["azureml_ddp"]["losses"] == only["auto"]["losses"]
