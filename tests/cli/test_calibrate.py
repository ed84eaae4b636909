"""`plan --calibrate`, as it is typed, on runs of a real MLflow store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from tests.tracking.conftest import _empty_store, client, store

from azureml_strategy.cli import main
from azureml_strategy.tracking import JobMLFlowLogger

__all__ = ["_empty_store", "client", "store"]  # fixtures

_PLAN = ["plan", "resnet50_imagenet", "--sizes", "nc24ads_a100_v4", "--nodes", "1,2", "--strategies", "ddp"]


def log_run(store: str, nodes: int, rate: float, device: str = "NVIDIA A100 80GB PCIe") -> str:
    """A finished run of ResNet-50, as our logger writes it."""
    tags = {
        "azureml_strategy.recipe": "resnet50_imagenet",
        "azureml_strategy.overrides": f"cluster=nc24ads_a100_v4 cluster.num_nodes={nodes}",
        "azureml_strategy.vm_size": "Standard_NC24ads_A100_v4",
        "azureml_strategy.device": device,
        "azureml_strategy.compiled": "true",
        "throughput.unit": "images",
        "network.transport": "socket",
    }
    logger = JobMLFlowLogger(tracking_uri=store, tags=tags)
    logger.log_hyperparams({"trainer/precision": "bf16-mixed"})
    figures = {"samples_per_second": rate, "nodes": nodes, "devices": nodes, "steps": 500}
    logger.log_metrics({f"summary/{name}": float(value) for name, value in figures.items()}, step=100)
    logger.finalize()
    return str(logger.run_id)


@pytest.fixture
def runs(store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Runs on 1, 1 and 4 nodes, of which an image took 1.2 times what the planner says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    return [log_run(store, 1, 2000.0), log_run(store, 1, 2020.0), log_run(store, 4, 6000.0)]


def rates(file: str) -> list[float]:
    candidates = json.loads(Path(file).read_text())["candidates"]
    return [each["samples_per_second"] for each in sorted(candidates, key=lambda each: each["nodes"])]


def test_a_plan_says_on_which_runs_it_was_calibrated(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_PLAN, "--calibrate", *runs, "--save-calibration", "ours.json", "--output", "plan.json"]) == 0
    shown = capsys.readouterr().out
    names = ", ".join(each[:8] for each in runs)
    assert shown.startswith(f"With a calibration on 3 runs of A100 ({names}): median error ")
    assert shown.index("Not told by these runs") < shown.index("| size" if "| size" in shown else "size")
    assert f"Speed is derived from calibration on 3 runs of A100 ({names})" in shown
    assert "ours.json, plan.json" in shown
    written = json.loads(Path("plan.json").read_text())
    assert written["calibration"] == json.loads(Path("ours.json").read_text())
    assert [each["measured"] for each in written["calibration"]["fits"]] == [2000, 2020, 6000]
    assert rates("plan.json")[0] == pytest.approx(2010, rel=0.02)


def test_a_saved_calibration_gives_the_same_plan(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_PLAN, "--output", "without.json"]) == 0
    assert main([*_PLAN, "--calibrate", *runs, "--save-calibration", "ours.json", "--output", "first.json"]) == 0
    assert main([*_PLAN, "--calibrate", "ours.json", "--output", "second.json"]) == 0
    assert rates("first.json") == rates("second.json") != rates("without.json")
    assert json.loads(Path("without.json").read_text())["calibration"] is None
    assert capsys.readouterr().out.count("With a calibration on 3 runs of A100") == 2


def test_the_store_and_a_folder_name_runs(
    runs: list[str], store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///another.db")
    Path("outputs").mkdir()
    Path("outputs/run.json").write_text(json.dumps({"run_id": runs[0], "store": store}))
    assert main([*_PLAN, "--calibrate", "outputs"]) == 0
    assert main([*_PLAN, "--calibrate", runs[0], "--store", store]) == 0
    assert capsys.readouterr().out.count(f"With a calibration on 1 run of A100 ({runs[0][:8]})") == 2


def test_runs_that_tell_nothing_are_named(
    runs: list[str], store: str, client: MlflowClient, capsys: pytest.CaptureFixture[str]
) -> None:
    on_cpu, unfinished = log_run(store, 1, 3.0, device="cpu"), client.create_run("0").info.run_id
    assert main([*_PLAN, "--calibrate", runs[0], on_cpu, unfinished]) == 0
    shown = capsys.readouterr().out
    assert f"{on_cpu} is left out: it ran on a CPU." in shown
    assert f"{unfinished} is left out: it is running" in shown
    assert "With a calibration on 1 run" in shown
    assert main([*_PLAN, "--calibrate", on_cpu, unfinished]) == 2
    said = capsys.readouterr().err
    assert "No run can be calibrated on." in said
    assert "Name finished runs of recipes on Azure's GPUs." in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--calibrate", "0a1b2c3d"], "has no run 0a1b2c3d"),
        (["--calibrate", "absent.json"], "There is no absent.json"),
        (["--calibrate", "broken.json"], "broken.json is no calibration"),
        (["--calibrate", "broken.json", "0a1b"], "Name it alone"),
        (["--calibrate", "0a1b", "model.width=3"], "Write what is changed in the recipe before --calibrate"),
        (["--save-calibration", "ours.json"], "belong to --calibrate"),
        (["--store", "sqlite:///x.db"], "belong to --calibrate"),
    ],
)
def test_wrong_words_are_said_to_be(
    words: list[str],
    says: str,
    store: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    Path("broken.json").write_text('{"calibration": "')
    assert main([*_PLAN, *words]) == 2
    assert says in capsys.readouterr().err
