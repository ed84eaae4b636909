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
from azureml_strategy.cluster.emulated import EMULATED_TAG
from azureml_strategy.emulator import error_sentence
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


def test_a_failed_run_has_its_reason_everywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "MisconfigurationException: nobody has logged 'val/los'."
    figures = [
        Figures(run_id="a", nodes=1, devices=1, samples_per_second=1.0),
        Figures(run_id="b", nodes=2, problem="failed", error=said),
    ]
    monkeypatch.setattr("azureml_strategy.study.run._runs", lambda options: iter(figures))
    assert run_study(StudyOptions(recipe="r", nodes=[1, 2], local=True)) == 1
    assert f"2 nodes failed: {said}" in capsys.readouterr().out
    page = study_page(json.loads(Path("outputs/study.json").read_text()))
    assert f"2 nodes failed: {said}" in page.notes
    assert f"b: failed: {said}" in page.steps[0].text


def test_the_page_says_that_its_figures_are_emulated_wherever_they_are(
    store: MlflowClient, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make_run(nodes, 10.0 * nodes) for nodes in (1, 2)]
    for each in runs:
        store.set_tag(each, EMULATED_TAG, "true")
    assert main(["study", "--runs", ",".join(runs), "--price-per-hour", "3.6"]) == 0
    assert "Emulated: all nodes share the cores of one machine" in capsys.readouterr().out
    page = study_page(json.loads(Path("outputs/study.json").read_text()))
    told = [page.kicker, page.headline, *page.verdict, *page.notes[:1]]
    told += [each.more for each in page.tiles] + [each.title for each in page.sections]
    assert [each for each in told if "emulated" not in each.lower()] == []


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["Traceback (most recent call last):", '  File "a.py"', "torch.OutOfMemoryError: CUDA out of memory."], -1),
        (["[rank0]: Traceback", "[rank0]: ValueError: no", "", "Set the environment variable HYDRA_FULL_ERROR=1"], 1),
        (["azureml-strategy: The recipe has no key.", "  a hint", "Exception ignored in: <x>"], 0),
        (["KeyError: 1", "The above exception was the direct cause", "own.StepError"], -1),
        (["step 3", "Segmentation fault", ""], 1),
        ([], None),
    ],
)
def test_the_sentence_of_an_error(lines: list[str], sentence: int | None) -> None:
    wanted = "" if sentence is None else lines[sentence].removeprefix("[rank0]: ").removeprefix("azureml-strategy: ")
    assert error_sentence(lines) == wanted


def test_the_sentence_of_an_error_has_no_secret() -> None:
    assert "sig=abc" not in error_sentence([f"ValueError: https://x.blob.core.windows.net/a?sv=1&sig={'abc' * 10}"])


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
