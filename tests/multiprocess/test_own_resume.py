"""A plain script that is ended in the middle and started again ends as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.multiprocess.conftest import Job, RunJob
from tests.multiprocess.scripts.noisy import curve

from azureml_strategy.checkpoint.fit_resume import OUTPUT_VARIABLE
from azureml_strategy.cluster.environ import CHECKPOINT_SWITCH

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

MORE = [pytest.param(each, marks=pytest.mark.exhaustive) for each in ("stock_ddp", "zero_2")]
SHARDED = [pytest.param(each, marks=pytest.mark.exhaustive) for each in ("zero", "model_parallel", "pipeline")]


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks die at once here: none needs time to end well."""
    monkeypatch.setattr("azureml_strategy.emulator.processes._GRACE_SECONDS", 20)


def attempt(run_job: RunJob, folder: Path, *arguments: str, automatic: str = "", **options: Any) -> Job:
    """One start of the script, with the same output as the one before."""
    extra = {"RESULTS": str(folder / "results"), OUTPUT_VARIABLE: str(folder / "run")}
    if automatic:
        extra[CHECKPOINT_SWITCH] = automatic
    folder.mkdir(exist_ok=True)
    job = run_job("own_resume.py", *arguments, json.dumps(options), nodes=2, extra=extra)
    files = (folder / "results").glob("*.json")
    return Job(job.outcome, job.output, {int(file.stem): json.loads(file.read_text()) for file in files})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["ddp", *SHARDED, *MORE])
def test_one_line(run_job: RunJob, tmp_path: Path, strategy: str) -> None:
    whole = attempt(run_job, tmp_path / "whole", strategy, "line", "-", "kill")
    assert whole.exit_code == 0, whole.output
    killed = attempt(run_job, tmp_path / "killed", strategy, "line", "5", "kill")
    assert killed.exit_code != 0, killed.output
    again = attempt(run_job, tmp_path / "killed", strategy, "line", "-", "kill")
    assert again.exit_code == 0, again.output
    assert "Restoring states from the checkpoint path at" in again.output
    assert again.results == whole.results
    assert curve(tmp_path / "killed/curve.jsonl") == curve(tmp_path / "whole/curve.jsonl")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["default", pytest.param("stock", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("strategy", ["ddp", *SHARDED, *MORE])
def test_no_line(run_job: RunJob, tmp_path: Path, strategy: str, kind: str) -> None:
    whole = attempt(run_job, tmp_path / "whole", strategy, kind, "-", "term")
    assert whole.exit_code == 0, whole.output
    stopped = attempt(run_job, tmp_path / "stopped", strategy, kind, "5", "term", automatic="auto")
    assert stopped.exit_code == 143, stopped.output
    again = attempt(run_job, tmp_path / "stopped", strategy, kind, "-", "term", automatic="auto")
    assert again.exit_code == 0, again.output
    assert "Restoring states from the checkpoint path at" in again.output
    for name in ("step", "weights", "ours"):
        assert again.each(name) == whole.each(name)
    assert curve(tmp_path / "stopped/curve.jsonl") == curve(tmp_path / "whole/curve.jsonl")
