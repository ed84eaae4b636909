from __future__ import annotations

import io

import pytest
from tests.jobs.azure_service.service import AzureService
from tests.jobs.rendering import SIZE, cache

from azureml_strategy.jobs import SubmittedJob, submit_recipe
from azureml_strategy.jobs.follow import LogReader, follow_job

__all__ = ["cache"]  # a fixture
LOG = """\
Azure ML job: launcher pytorch, 1 node(s) x 8 process(es)
Epoch 0: batch 10/22, images/s 100.0, train/loss 2.1
Epoch 0: batch 22/22, images/s 120.0, train/loss 1.1, val/top1 0.5
Epoch 1: batch 22/22, images/s 140.0, train/loss 0.4
"""


@pytest.fixture
def job(azure_service: AzureService) -> SubmittedJob:
    return submit_recipe("resnet50_ddp", [SIZE, "cluster.price_per_hour=1"], name="followed")


def test_the_log_the_throughput_and_the_end(azure_service: AzureService, job: SubmittedJob) -> None:
    azure_service.write_log("followed", LOG)
    out = io.StringIO()
    assert follow_job(job, out) == "Completed"
    assert LOG in out.getvalue()
    assert out.getvalue().endswith("Throughput: 120.0 images/s (median of 3 readings)\nStatus: Completed\n")


def test_a_job_that_fails(azure_service: AzureService) -> None:
    azure_service.jobs.states = ("Running", "Failed")
    azure_service.jobs.failure = ("UserError", "The disk is full.")
    job = submit_recipe("resnet50_ddp", [SIZE, "cluster.price_per_hour=1"], name="failed")
    out = io.StringIO()
    assert follow_job(job, out) == "Failed"
    assert out.getvalue().endswith("Status: Failed\nUserError: The disk is full.\n")
    assert "Throughput" not in out.getvalue()


def test_a_user_who_stops_looking(
    azure_service: AzureService, job: SubmittedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    azure_service.jobs["followed"].states = ["Running"]

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    out = io.StringIO()
    assert follow_job(job, out) == "Running"
    assert out.getvalue().endswith("The job goes on. `azureml-strategy jobs cancel followed` ends it.\n")


def test_a_line_that_comes_in_pieces() -> None:
    reader = LogReader(io.StringIO())
    for piece in ("Epoch 3: batch 1/2, tok", "ens/s 10.", "5\nEpoch 3: batch 2/2, tokens/s 1", "1.5, x 2\n"):
        reader.write(piece)
    assert reader.throughput() == "11.0 tokens/s (median of 2 readings)"
    assert LogReader(io.StringIO()).throughput() is None
