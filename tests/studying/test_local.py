"""A study of emulated jobs that really run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from tests.preloaded import start_forked

from azureml_strategy.cli import main
from azureml_strategy.studying import StudyOptions
from azureml_strategy.studying.local import threads_per_process

TINY = ("data.image_size=32", "data.batch_size=2", "tracking.throughput.warmup_steps=1", "trainer.precision=32-true")


@pytest.mark.slow
def test_two_sizes(store: MlflowClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("azureml_strategy.emulator.processes._start", start_forked)
    arguments = ["resnet50_synthetic", "--nodes", "1,2", "--local", "--steps", "4", *TINY]
    assert main(["study", *arguments, "tracking.cost.price_per_hour=3.6"]) == 0
    output = capsys.readouterr().out
    assert output.index("\n1 node\n") < output.index("\n2 nodes\n")
    assert "Emulated: all nodes share this machine's" in output
    runs = json.loads(Path("outputs/study.json").read_text())["runs"]
    assert [(run["nodes"], run["devices"], run["transport"], run["problem"]) for run in runs] == [
        (1, 1, "gloo", ""),
        (2, 2, "gloo", ""),
    ]
    assert all(run["samples_per_second"] > 0 and run["unit"] == "images" for run in runs)
    assert runs[0]["efficiency"] == 1.0
    assert runs[1]["efficiency"] == pytest.approx(runs[1]["speed_up"] / 2)
    assert [run["cost_per_million_samples"] for run in runs] == pytest.approx(
        [1e6 * run["nodes"] * 0.001 / run["samples_per_second"] for run in runs]
    )
    assert Path("outputs/study.png").read_bytes().startswith(b"\x89PNG")
    assert {store.get_run(run["run_id"]).info.status for run in runs} == {"FINISHED"}


def test_a_process_computes_with_as_many_threads_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS")
    options = StudyOptions(recipe="r", nodes=[1, 2], processes_per_node=2, local=True)
    assert threads_per_process(options) == "4"
    assert threads_per_process(StudyOptions(recipe="r", nodes=[64], local=True)) == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_process(options) == "3"
