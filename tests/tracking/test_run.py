from __future__ import annotations

import random
import sys
import traceback
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from azureml_strategy.tracking.run import TrackingError, join_run, request_run, resolve_tracking_uri
from azureml_strategy.tracking.store import StoreAwayError, store_errors


def test_the_store_is_given_or_of_the_environment_or_a_local_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_tracking_uri(None) == "sqlite:///mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://from-the-job")
    assert resolve_tracking_uri(None) == "http://from-the-job"
    assert resolve_tracking_uri("http://given") == "http://given"


def test_joining_keeps_name_and_experiment_and_adds_tags(client: MlflowClient, store: str, job_run: str) -> None:
    run = join_run(store, job_run, {"team": "vision", "note": "x" * 2000, "mlflow.runName": "another"})
    after = client.get_run(job_run)
    assert (run.run_id, run.experiment_name) == (job_run, "the-jobs-experiment")
    assert after.info.run_name == "the-job"
    assert after.data.tags["team"] == "vision"
    assert len(after.data.tags["note"]) == 1000


def test_an_unknown_run_of_the_job_names_run_and_store(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0123abcd")
    with pytest.raises(TrackingError, match=r"MLFLOW_RUN_ID=0123abcd .*mlflow\.db does not have") as raised:
        join_run(store, "0123abcd")
    assert "unset MLFLOW_RUN_ID" in str(raised.value)
    with pytest.raises(TrackingError, match="run_id=another"):
        join_run(store, "another")


def test_the_experiment_is_named_or_of_the_environment(
    store: str, client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _experiment(store, None) == "lightning_logs"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "by-name")
    assert _experiment(store, None) == "by-name"
    assert _experiment(store, None) == "by-name"  # now it exists
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", client.create_experiment("by-id"))
    assert _experiment(store, None) == "by-id"
    assert _experiment(store, "given") == "given"


def test_a_new_run_has_name_and_tags_and_is_found_again(store: str, client: MlflowClient) -> None:
    request = request_run(store, None, "e", "mine", {"n": 3})
    run = request.open()
    assert (run.run.info.run_name, run.run.data.tags["n"], run.run.info.start_time) == ("mine", "3", request.started_ms)
    assert request.open(again=True).run_id == run.run_id, "its creation was not answered"
    assert request_run(store, None, "e").open(again=True).run_id != run.run_id


def test_the_name_is_given_or_suggested_or_the_script_s(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def name(run_name: str | None, tags: dict[str, str], suggested: str | None) -> str:
        return str(request_run(store, None, "e", run_name, tags, None, suggested).open().run.info.run_name)

    tag = {"mlflow.runName": "of the tag"}
    assert name("given", {}, "suggested") == "given"
    assert name(None, tag, "suggested") == "of the tag"
    assert name(None, {}, "suggested") == "suggested"
    monkeypatch.setattr(sys, "argv", ["/somewhere/train_mine.py", "--rate", "1"])
    assert name(None, {}, None) == "train_mine"


def test_opening_a_run_draws_no_random_number(store: str) -> None:
    """MLflow would name the run by Python's random numbers, which the user has seeded."""
    random.seed(1)
    before = random.getstate()
    request_run(store, None, "new experiment").open()
    assert random.getstate() == before


@pytest.mark.parametrize("run_id", [None, "0123"])
def test_a_password_in_the_store_s_address_is_not_told(run_id: str | None) -> None:
    request = request_run("http://me:url-password-9@127.0.0.1:9", run_id)
    assert "url-password-9" not in repr(request)
    with pytest.raises(StoreAwayError) as caught, store_errors():
        request.open()
    assert "url-password-9" not in "".join(traceback.format_exception(caught.value))


def test_no_secret_in_the_tags_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "opaque-4711")
    uri = f"sqlite:///{tmp_path / 'tags.db'}"
    tags = {"mlflow.source.git.repoURL": "https://abcdef@github.com/o/r", "note": "opaque-4711", "api_key": "x1"}
    run = request_run(uri, tags=tags).open().run
    assert {name: run.data.tags[name] for name in tags} == {
        "mlflow.source.git.repoURL": "https://<redacted>@github.com/o/r",
        "note": "<redacted>",
        "api_key": "<redacted>",
    }


def _experiment(store: str, name: str | None) -> str:
    return request_run(store, None, name).open().experiment_name
