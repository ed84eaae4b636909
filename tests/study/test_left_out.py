"""A run that a table, a picture or a page of a study leaves out is counted and says why."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from tests.study.conftest import MakeRun

from azureml_strategy.cli import main
from azureml_strategy.study.options import StudyOptions
from azureml_strategy.study.page import study_page
from azureml_strategy.study.run import run_study
from azureml_strategy.study.scaling import Figures

# What a run has logged beside two sound ones, and what its row says.
ODD: dict[str, tuple[float | None, str, str]] = {
    "sound": (2_900.0, "FINISHED", ""),
    "not a number": (math.nan, "FINISHED", "no throughput: it logged nan"),
    "infinite": (math.inf, "FINISHED", "no throughput: it logged "),
    "zero": (0.0, "FINISHED", "no throughput: it logged 0"),
    "nothing": (None, "FINISHED", "no throughput: every step was warm-up"),
    "failed": (None, "FAILED", "failed"),
    "killed": (None, "KILLED", "killed"),
}


@pytest.mark.parametrize("name", ODD)
def test_a_run_that_is_not_compared(make_run: MakeRun, capsys: pytest.CaptureFixture[str], name: str) -> None:
    rate, status, problem = ODD[name]
    runs = [make_run(1, 1000.0), make_run(2, 1900.0), make_run(3, rate, status=status)]
    assert main(["study", "--runs", ",".join(runs)]) == bool(problem)
    written = Path("outputs/study.json").read_text()
    content = json.loads(written, parse_constant=pytest.fail)
    odd = next(run for run in content["runs"] if run["run_id"] == runs[2])
    assert odd["problem"].startswith(problem)
    assert [run["efficiency"] for run in content["runs"] if run is not odd] == [1.0, 0.95]
    said = "2 of 3 runs measured: "
    assert (said in capsys.readouterr().out) == bool(problem)
    assert any(said in note for note in study_page(content).notes) == bool(problem)


def test_a_run_whose_number_of_devices_nobody_knows(store: MlflowClient, make_run: MakeRun) -> None:
    run_id = store.create_run("0").info.run_id
    store.log_metric(run_id, "summary/samples_per_second", 5.0)
    store.set_tag(run_id, "throughput.unit", "images")
    store.set_terminated(run_id)
    assert main(["study", "--runs", f"{make_run(1, 10.0)},{run_id}"]) == 1
    (problem,) = [
        run["problem"] for run in json.loads(Path("outputs/study.json").read_text())["runs"] if run["problem"]
    ]
    assert problem.startswith("no number of devices: it logged neither summary/devices nor ")


@pytest.mark.parametrize("given", [{"recipe": "r", "nodes": [4, 1, 2], "local": True}, {"runs": ["a", "b", "c"]}])
@pytest.mark.parametrize("done", [1, 2, 3])
def test_what_an_ended_study_did_not_come_to(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    given: dict[str, list],
    done: int,
) -> None:
    options = StudyOptions(**given, output=tmp_path / "a.json", plot=tmp_path / "a.png")
    sizes, ids = sorted(given.get("nodes", [1, 2, 4])), given.get("runs", ["x", "y", "z"])

    def ended(_: StudyOptions) -> Iterator[Figures]:
        for run_id, nodes in list(zip(ids, sizes, strict=True))[:done]:
            yield Figures(run_id=run_id, nodes=nodes, devices=nodes, samples_per_second=float(nodes))
        raise KeyboardInterrupt

    monkeypatch.setattr("azureml_strategy.study.run._runs", ended)
    assert run_study(options) == 130
    content = json.loads(options.output.read_text())
    left = [run for run in content["runs"] if run["problem"] == "not read: the study was ended before"]
    assert len(content["runs"]) == 3
    assert [run["run_id"] or run["nodes"] for run in left] == (ids if "runs" in given else sizes)[done:]
    assert (f"{done} of 3 runs measured" in capsys.readouterr().out) == (done < 3)
    study_page(content)
