"""The section of a page that shows profiles: of a real training, and of files that are not whole."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from mlflow import MlflowClient
from tests.reporting.test_page import Reader
from tests.tracking.conftest import TinyModel
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.cli import main
from azureml_strategy.profiling import ProfileSteps
from azureml_strategy.profiling.trace_summary import summarize
from azureml_strategy.reporting.collect import collect_run
from azureml_strategy.reporting.page import render
from azureml_strategy.reporting.profiles import Artifacts, read_profiles, read_summary
from azureml_strategy.reporting.run_page import run_page
from azureml_strategy.tracking import JobMLFlowLogger

SUMMARY = {
    "device": "gpu",
    "steps": [20, 21],
    "window_s": 0.5,
    "compute_s": 0.3,
    "exposed_communication_s": 0.1,
    "overlapped_communication_s": 0.05,
    "copy_s": 0.02,
    "idle_s": 0.08,
    "data_wait_s": 0.05,
    "collectives": [{"name": "all_reduce", "calls": 8, "total_s": 0.15, "exposed_s": 0.1}],
    "operators": [{"name": "gemm <b>", "calls": 4, "self_s": 0.25}],
}


def profiled(folder: Path, rank: int, text: str, steps: str = "steps_20-21") -> None:
    (folder / "profile").mkdir(parents=True, exist_ok=True)
    (folder / f"profile/summary_rank_{rank}.json").write_text(text)
    (folder / f"profile/trace_rank_{rank}_{steps}.json.gz").write_bytes(b"")


def test_a_training_that_was_profiled(client: MlflowClient, store: str, tmp_path: Path) -> None:
    Trainer(
        logger=JobMLFlowLogger(tracking_uri=store),
        callbacks=[ProfileSteps("2-4", signal=None)],
        accelerator="cpu",
        devices=1,
        max_steps=6,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    ).fit(TinyModel(), DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4))
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    record = collect_run(run.info.run_id, store)
    (profile,) = record.profiles
    assert profile.trace == "trace_rank_0_steps_2-4.json.gz"
    assert profile.summary is not None
    assert sum(profile.summary.parts.values()) == pytest.approx(profile.summary.window_s, rel=1e-6)
    text = render(run_page(record))
    assert "A profiled step" in Reader(text).charts
    for shown in ("Time of rank 0, steps 2 to 4, times on the CPU", "trace_rank_0_steps_2-4.json.gz", "aten::"):
        assert shown in text
    assert "ui.perfetto.dev" in text
    assert Reader(text).fetched == []


def test_each_rank_has_its_figures(client: MlflowClient, store: str, tmp_path: Path) -> None:
    run_id = client.create_run("0").info.run_id
    for rank, exposed in ((0, 0.1), (3, 0.2)):
        changed = {**SUMMARY, "exposed_communication_s": exposed, "compute_s": 0.4 - exposed}
        profiled(tmp_path / "run", rank, json.dumps(changed))
    (tmp_path / "run/profile/trace_rank_3_steps_20-21.json.gz").unlink()
    client.log_artifacts(run_id, str(tmp_path / "run/profile"), "profile")
    text = render(run_page(collect_run(run_id, store)))
    assert re.search(r"<td>3</td><td[^>]*>20 to 21</td><td[^>]*>on the disk of the rank only, or nowhere</td>", text)
    assert text.count("on the disk of the rank only") == 1
    assert "exposed communication<b>20.0% to 40.0%</b>" in text
    row = re.search(r"<td>of it all_reduce</td><td[^>]*>50</td><td[^>]*>20.0%</td><td[^>]*>4</td>", text)
    assert row is not None
    assert "gemm &lt;b&gt;" in text
    assert "Operators of rank 3, steps 20 to 21, times on the GPU" in text


def test_a_gpu_that_waits_for_the_host_is_shown_idle(client: MlflowClient, store: str, tmp_path: Path) -> None:
    trace = json.loads((Path(__file__).parents[1] / "profiling/samples/launch_bound_gpu.json").read_text())
    run_id = client.create_run("0").info.run_id
    profiled(tmp_path, 0, json.dumps(summarize(trace)), "step_12")
    client.log_artifacts(run_id, str(tmp_path / "profile"), "profile")
    text = render(run_page(collect_run(run_id, store)))
    assert "The GPU computes in 3.4% of their time, and is idle in 95.8%." in text
    assert "idle, waiting for the host<b>93.8%</b>" in text
    assert "idle, waiting for data<b>2.0%</b>" in text
    assert "computing<b>3.4%</b>" in text
    assert "nvjet_tst (cuBLAS)" in text


def test_a_run_folder_adds_what_is_not_among_the_artifacts(client: MlflowClient, store: str, tmp_path: Path) -> None:
    run_id = client.create_run("0").info.run_id
    profiled(tmp_path / "run", 1, json.dumps(SUMMARY))
    (tmp_path / "run/run.json").write_text(json.dumps({"run_id": run_id, "store": store}))
    assert main(["report", str(tmp_path / "run")]) == 0
    text = (tmp_path / "run/report.html").read_text()
    assert "Time of rank 1" in text
    assert "trace_rank_1_steps_20-21.json.gz" in text
    os.utime(tmp_path / "run/profile/summary_rank_1.json", (1000, 1000))  # of a run that had the folder before
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "Time of rank 1" not in (tmp_path / "run/report.html").read_text()


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "3", json.dumps(SUMMARY)[:200], "[" * 100_000, "\x00\xff"),
        *(json.dumps({**SUMMARY, "steps": []}), json.dumps({**SUMMARY, "window_s": 0})),
        *(json.dumps({**SUMMARY, "compute_s": float("nan")}), json.dumps({**SUMMARY, "idle_s": -1})),
        *(json.dumps({**SUMMARY, "operators": [{"name": "x"}]}), json.dumps({**SUMMARY, "collectives": 3})),
        json.dumps({**SUMMARY, "copy_s": "much"}),
    ],
)
def test_a_summary_that_cannot_be_read_is_one_sentence(
    client: MlflowClient, store: str, tmp_path: Path, text: str
) -> None:
    assert read_summary(text) is None
    run_id = client.create_run("0").info.run_id
    profiled(tmp_path, 0, text)
    client.log_artifacts(run_id, str(tmp_path / "profile"), "profile")
    page = render(run_page(collect_run(run_id, store)))
    assert "Its summary cannot be read: it may be half written." in page
    assert "trace_rank_0_steps_20-21.json.gz" in page


def test_many_ranks_and_long_names_stay_small(client: MlflowClient, store: str, tmp_path: Path) -> None:
    run_id = client.create_run("0").info.run_id
    operators = [{"name": f"{number}{'x' * 5000}", "calls": 1, "self_s": 0.001} for number in range(3000)]
    for rank in range(300):
        profiled(tmp_path, rank, json.dumps({**SUMMARY, "operators": operators[: 3000 if rank < 2 else 1]}))
    profiles = read_profiles([Artifacts(str(tmp_path), "")])
    assert [each.rank for each in profiles] == list(range(300))
    assert sum(each.summary is not None for each in profiles) == 8
    record = collect_run(run_id, store, folder=tmp_path)
    text = render(run_page(record))
    assert "260 further ranks have left files." in text
    assert len(text) < 200_000


def test_the_trace_is_that_of_the_summary(tmp_path: Path) -> None:
    profiled(tmp_path, 0, json.dumps(SUMMARY))
    for steps in ("step_3", "steps_100-120"):
        (tmp_path / f"profile/trace_rank_0_{steps}.json.gz").write_bytes(b"")
    (profile,) = read_profiles([Artifacts(str(tmp_path), "")])
    assert profile.trace == "trace_rank_0_steps_20-21.json.gz"
    assert profile.traces[0] == "trace_rank_0_step_3.json.gz"
