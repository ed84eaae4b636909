"""The verb `report`, on what it can show and on what it cannot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from tests.bench.conftest import pairs, sweep
from tests.reporting.conftest import _empty_store, client, store
from tests.reporting.example import log_points

from azureml_strategy.bench.results import Results, Sweep
from azureml_strategy.cli import main

__all__ = ["_empty_store", "client", "pairs", "store", "sweep"]  # fixtures

STUDY = {
    "base": "a",
    "runs": [
        {"run_id": name, "name": name, "nodes": nodes, "devices": nodes, "unit": "images", "samples_per_second": rate}
        | {"cost_per_million_samples": 2.0 * nodes, "currency": "USD", "transport": "gloo", "problem": ""}
        for name, nodes, rate in (("a", 1, 100.0), ("b", 2, 190.0), ("c", 4, 260.0))
    ],
    "differences": {"data/num_workers": ["1", "4"]},
}


@pytest.fixture
def run_id(client: MlflowClient, store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    run_id: str = client.create_run("0").info.run_id
    log_points(client, run_id, [("loss", 1.0, step, step) for step in range(3)])
    return run_id


def test_a_run_by_its_id(run_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", run_id, "--output", "deep/page.html"]) == 0
    assert capsys.readouterr().out.endswith(f"{Path('deep/page.html').absolute()}\n")
    assert run_id in Path("deep/page.html").read_text()


def test_a_run_by_its_folder_is_found_in_the_store_that_the_folder_names(
    run_id: str, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///another.db")
    Path("outputs").mkdir()
    Path("outputs/run.json").write_text(json.dumps({"run_id": run_id, "store": store}))
    assert main(["report", "outputs"]) == 0
    assert run_id in Path("outputs/report.html").read_text()


def test_a_store_whose_password_the_folder_does_not_name_is_that_of_the_environment(run_id: str) -> None:
    Path("run.json").write_text(json.dumps({"run_id": run_id, "store": "postgresql://<redacted>@host/db"}))
    assert main(["report", "."]) == 0


def test_several_runs(run_id: str) -> None:
    assert main(["report", run_id, run_id, "--output", "both.html"]) == 0
    assert "Comparison of runs" in Path("both.html").read_text()


def test_a_study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("study.json").write_text(json.dumps(STUDY))
    assert main(["report", "study.json"]) == 0
    text = Path("report.html").read_text()
    assert "4 devices are 2.6 times as fast as 1: 65% of ideal scaling." in text
    assert "1 device: 2.00 USD a million images." in text
    assert text.count("<svg") == 3
    assert "The runs differ in more than size: data/num_workers." in text


def test_a_benchmark(sweep: Results, pairs: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bench.json").write_text(sweep.to_json())
    assert main(["report", "bench.json"]) == 2, "broadcast has one of two sizes"
    assert isinstance(sweep.measured, Sweep)
    Path("bench.json").write_text(replace(sweep, measured=Sweep(sweep.measured.wrong)).to_json())
    assert main(["report", "bench.json"]) == 0
    assert "do not train on these nodes" in Path("report.html").read_text()
    even = dict.fromkeys([(0, 1), (0, 2), (1, 2)], 20.0) | dict.fromkeys([(0, 3), (1, 3), (2, 3)], 5.0)
    Path("bench.json").write_text(pairs(even).to_json())  # type: ignore[operator]
    assert main(["report", "bench.json"]) == 0
    text = Path("report.html").read_text()
    assert "Slow: node 3" in text
    assert text.count("<svg") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nobodys-run"], "has no run nobodys-run. Name the store"),
        (["empty"], "empty has no run.json"),
        (["not/there.json"], "There is no not/there.json"),
        (["text.json"], "text.json is no JSON file"),
        (["plan.json"], "neither the JSON file of `study` nor of `bench`"),
        (["broken.json"], "This is no JSON file of a study"),
        (["bench.json"], "This is no JSON file of a benchmark"),
        (["half"], "does not name a run"),
        (["any", "--store", "sqlite:///none.db"], "There is no store"),
        (["any", "--store", "http://127.0.0.1:9"], "does not answer"),
    ],
)
def test_what_it_cannot_show_is_one_sentence(
    run_id: str, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    Path("empty").mkdir()
    Path("half").mkdir()
    Path("half/run.json").write_text("[]")
    Path("text.json").write_text("hello")
    Path("plan.json").write_text('{"plan": 1}')
    Path("broken.json").write_text('{"base": null, "runs": [3]}')
    Path("bench.json").write_text('{"conditions": {}, "collectives": []}')
    assert main(["report", *words]) == 2
    out, error = capsys.readouterr()
    assert said in error
    assert "Traceback" not in error
    assert out == ""
