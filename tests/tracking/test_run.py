from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from azureml_strategy.tracking.run import TrackingError, end_run, join_run, resolve_tracking_uri, start_run


def test_the_store_is_given_or_of_the_environment_or_a_local_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_tracking_uri(None) == "sqlite:///mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://from-the-job")
    assert resolve_tracking_uri(None) == "http://from-the-job"
    assert resolve_tracking_uri("http://given") == "http://given"


def test_joining_keeps_name_and_experiment_and_adds_tags(client: MlflowClient, store: str, job_run: str) -> None:
    run = join_run(store, job_run, {"team": "vision", "note": "x" * 2000, "mlflow.runName": "another"})
    after = client.get_run(job_run)
    assert (run.owned, run.run_id, run.experiment_name) == (False, job_run, "the-jobs-experiment")
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
    assert start_run(store, None).experiment_name == "lightning_logs"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "by-name")
    assert start_run(store, None).experiment_name == "by-name"
    assert start_run(store, None).experiment_name == "by-name"  # now it exists
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", client.create_experiment("by-id"))
    assert start_run(store, None).experiment_name == "by-id"
    assert start_run(store, "given").experiment_name == "given"


def test_a_new_run_has_name_and_tags_and_ends(store: str, client: MlflowClient) -> None:
    run = start_run(store, "e", run_name="mine", tags={"n": 3})
    end_run(run, "FAILED")
    after = client.get_run(run.run_id)
    assert run.owned
    assert (after.info.run_name, after.data.tags["n"], after.info.status) == ("mine", "3", "FAILED")


def test_a_run_that_cannot_be_ended_is_a_warning(store: str, client: MlflowClient) -> None:
    run = start_run(store, "e")
    client.delete_run(run.run_id)
    with pytest.warns(UserWarning, match=f"Run {run.run_id} could not be marked FINISHED"):
        end_run(run, "FINISHED")


@pytest.mark.parametrize("run_id", [None, "0123"])
def test_a_password_in_the_store_s_address_is_not_told(monkeypatch: pytest.MonkeyPatch, run_id: str | None) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri = "http://me:url-password-9@127.0.0.1:9"
    with pytest.raises(TrackingError, match=r"http://<redacted>@127\.0\.0\.1:9 cannot be used: ") as caught:
        join_run(uri, run_id) if run_id else start_run(uri, "mine")
    assert "url-password-9" not in "".join(traceback.format_exception(caught.value))


def test_no_secret_in_the_tags_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "opaque-4711")
    uri = f"sqlite:///{tmp_path / 'tags.db'}"
    tags = {"mlflow.source.git.repoURL": "https://abcdef@github.com/o/r", "note": "opaque-4711", "api_key": "x1"}
    run = start_run(uri, "mine", tags=tags)
    shown = {name: run.run.data.tags[name] for name in tags}
    assert shown == {
        "mlflow.source.git.repoURL": "https://<redacted>@github.com/o/r",
        "note": "<redacted>",
        "api_key": "<redacted>",
    }
