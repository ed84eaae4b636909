from __future__ import annotations

import re
from typing import Any

import pytest
from tests.jobs.azure_service.service import AzureService

from azureml_strategy.jobs import JobError, ServiceError, SubmittedJob, sweep
from azureml_strategy.jobs.listing import tracking_uri
from azureml_strategy.jobs.sweep import SweepJob, SweepOptions, plan_sweep, run_sweep

RECIPE = "resnet50_synthetic"
JOB = ["cluster=nc4as_t4_v3", "cluster.price_per_hour=1", "job.environment.image=ours"]
QUICK = SweepOptions(poll_interval_s=0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_concurrent": 0}, "max_concurrent=0 lets no job start"),
        ({"max_concurrent": 2, "wait": False}, "max_concurrent needs wait=true"),
        ({"metric": "val/top1", "wait": False}, "metric=val/top1 is known only at the end"),
        ({"poll_interval_s": 0}, "poll_interval_s=0 must be more than 0"),
    ],
)
def test_options_that_cannot_be(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        SweepOptions(**arguments)


@pytest.mark.parametrize(
    ("job", "options", "words"),
    [
        (SweepJob(3, ["seed=1"], "a-3", status="Completed"), SweepOptions(), None),
        (SweepJob(3, [], "a-3", status="Submitted"), SweepOptions(wait=False), None),
        (
            SweepJob(3, ["seed=1"], "a-3", "https://s", "Canceled"),
            SweepOptions(),
            r"\(seed=1\) ended as Canceled",
        ),
        (SweepJob(3, [], "a-3", error="No quota."), SweepOptions(), r"#3 a-3 \(no overrides\): No quota\."),
        (SweepJob(3, [], "a-3", status="Completed"), SweepOptions(metric="a"), "logged no metric 'a'. It logged none"),
    ],
)
def test_what_a_job_did_not_give(job: SweepJob, options: SweepOptions, words: str | None) -> None:
    problem = job.problem(options)
    assert problem is None if words is None else re.search(words, problem or "")


def test_a_question_without_an_answer_is_asked_again(azure_service: AzureService) -> None:
    (job,) = plan_sweep(RECIPE, [[*JOB, "seed=1"]])
    azure_service.fail("GET", r"/jobs/sweep", 400, "Busy", "Not now.", times=2)
    run_sweep(RECIPE, [job], QUICK)
    assert (job.status, job.error) == ("Completed", None)
    assert len(azure_service.asked("GET", r"/jobs/sweep")) == 5


@pytest.mark.parametrize(("status", "asked"), [(400, 3), (403, 1)])
def test_a_job_that_nobody_can_tell_of(
    status: int, asked: int, azure_service: AzureService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_PATIENCE", 3)
    (job,) = plan_sweep(RECIPE, [[*JOB, "seed=1"]])
    azure_service.fail("GET", r"/jobs/sweep", status, "Refused", "No.", times=10)
    run_sweep(RECIPE, [job], QUICK)
    assert job.error is not None
    assert "How it ended is not known; it may go on. No (Refused" in job.error
    assert len(azure_service.asked("GET", r"/jobs/sweep")) == asked


def test_a_workspace_that_does_not_answer_is_no_metric(azure_service: AzureService) -> None:
    client = azure_service.client()
    azure_service.fail("GET", r"/workspaces/workspace$", 403, "AuthorizationFailed", "No permission.", times=2)
    with pytest.raises(ServiceError, match="AuthorizationFailed"):
        tracking_uri(client)
    assert sweep._read_metrics(SubmittedJob(client, "job", "")) == {}


def test_metrics_that_cannot_be_read_are_left_out(azure_service: AzureService) -> None:
    (job,) = plan_sweep(RECIPE, [[*JOB, "seed=1"]])
    azure_service.fail("GET", r"/mlflow/", 404, "NotFound", "No such run.")
    run_sweep(RECIPE, [job], QUICK)
    assert (job.status, job.metrics, job.error) == ("Completed", {}, None)
