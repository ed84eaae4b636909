"""The page of a recipe's run in MLflow, and the same run in other loggers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.artifacts import load_text
from mlflow.entities import Run
from omegaconf import OmegaConf
from tests.training.conftest import COMMAND, TINY, Compose, files, run, the_run

from azureml_strategy.training.checks import check_config
from azureml_strategy.training.recipes import RecipeError
from azureml_strategy.training.run import _all_sections, config_text

RECIPE = """\
# Mine.
defaults: [resnet50_synthetic, _self_]
vars: {api_key: literal-in-config-0815, place: "${oc.env:HOME}"}
"""
STEPS = "trainer.max_steps=2"


def git(*arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@f"]
    return subprocess.run(["git", *identity, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def all_runs(store: MlflowClient) -> list[Run]:
    experiments = [each.experiment_id for each in store.search_experiments()]
    return list(store.search_runs(experiments, order_by=["attributes.start_time"]))


@pytest.mark.exhaustive
def test_each_run_of_a_sweep_shows_what_it_is(store: MlflowClient) -> None:
    Path("mine.yaml").write_text(RECIPE)
    git("init", "-q", ".")
    git("add", "mine.yaml")
    git("commit", "-q", "-m", "first")
    more = ["+vars.secret=by-override", f"+vars.name={'n' * 200}"]
    done = run(COMMAND, "train", "mine.yaml", "-m", "model.learning_rate=0.1,0.2", *TINY, *more)
    assert not re.findall("Traceback|by-override", done.stdout)
    first, second = all_runs(store)
    tiny = " ".join(TINY[:3])
    assert first.info.run_name.startswith(f"mine model.learning_rate=0.1 {tiny} ")
    assert second.info.run_name.startswith(f"mine model.learning_rate=0.2 {tiny} ")
    assert len(first.info.run_name) <= 120
    tags, other = first.data.tags, second.data.tags
    assert (tags["azureml_strategy.recipe"], tags["mlflow.source.git.commit"]) == ("mine", git("rev-parse", "HEAD"))
    assert tags["azureml_strategy.git_uncommitted_changes"] == "false"
    assert " '+vars.secret=<redacted>' +vars.name=nn" in tags["azureml_strategy.overrides"]
    command = f"azureml-strategy train mine.yaml model.learning_rate=0.2 {tiny} "
    assert other["azureml_strategy.command"].startswith(command)
    config = OmegaConf.create(load_text(f"{second.info.artifact_uri}/config.yaml"))
    assert (config.model.learning_rate, config.vars.api_key) == (0.2, "<redacted>")
    assert OmegaConf.to_container(config.vars)["place"] == "${oc.env:HOME}"
    assert config.tracking.logger.experiment_name == "mine"
    for each in (first, second):
        steps = [point.step for point in store.get_metric_history(each.info.run_id, "epoch")]
        assert steps == [0, 1]
        assert "| val/top1 | " in each.data.tags["mlflow.note.content"]


def test_a_job_s_run_keeps_its_name(store: MlflowClient) -> None:
    without_git = {"PATH": "/nowhere"}
    emulated = [COMMAND, "emulate", "--", sys.executable, COMMAND, "train", "resnet50_synthetic", STEPS, *TINY]
    done = run(*emulated, "tracking.logger.run_name=other", variables=without_git)
    assert "Traceback" not in done.stdout
    job = the_run(store)
    assert job.info.run_name not in ("other", "resnet50_synthetic")
    assert job.data.tags["azureml_strategy.command"].startswith(f"azureml-strategy train resnet50_synthetic {STEPS}")
    assert "mlflow.source.git.commit" not in job.data.tags


def test_a_section_that_cannot_be_resolved_is_recorded_as_written() -> None:
    config = OmegaConf.create({"model": {"lr": "${vars.lr}"}, "vars": {"lr": 0.1}, "job": {"name": "${nowhere}"}})
    assert config_text(_all_sections(config)) == "model:\n  lr: 0.1\nvars:\n  lr: 0.1\njob:\n  name: ${nowhere}\n"


def scalars(folder: str) -> dict[str, list[tuple[int, float]]]:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events: Any = accumulators.EventAccumulator(folder)
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_the_same_metrics_in_every_logger_and_no_secret(store: MlflowClient) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    Path("mine.yaml").write_text(RECIPE)
    both = ["tracking/loggers=[tensorboard,wandb]", "tracking.loggers.wandb.offline=true"]
    measured = ["tracking.throughput.warmup_steps=0", "tracking.cost.price_per_hour=1", "+vars.secret=by-override"]
    done = run(COMMAND, "train", "mine.yaml", "-m", "seed=1,2", *TINY, *both, *measured)
    assert not re.findall("Traceback|by-override", done.stdout)
    for number, recorded in enumerate(all_runs(store)):
        (folder,) = files(f"multirun/*/*/{number}/tensorboard")
        shown = scalars(folder)
        assert shown.keys() - {"hp_metric"} == recorded.data.metrics.keys()
        assert {"summary/samples_per_second", "cost/run", "lr-SGD/pg1", "train/loss"} <= shown.keys()
        loss = [(point.step, point.value) for point in store.get_metric_history(recorded.info.run_id, "train/loss")]
        assert dict(shown["train/loss"]) == pytest.approx(dict(loss))
        assert "api_key: <redacted>" in Path(folder, "hparams.yaml").read_text()
        (written,) = Path().glob(f"multirun/*/*/{number}/wandb/offline-run-*/run-*.wandb")
        kept = written.read_bytes()
        assert all(name.encode() in kept for name in (*recorded.data.metrics, recorded.info.run_name, "<redacted>"))
    texts = [path.read_bytes() for path in Path("multirun").rglob("*") if path.is_file()]
    assert not [text for text in texts if b"literal-in-config-0815" in text or b"by-override" in text]


def test_a_restarted_job_goes_on_in_the_same_folder_and_wandb_run(composed: Compose, monkeypatch: Any) -> None:
    monkeypatch.setenv("AZUREML_RUN_ID", "bold_sky_12")
    config = composed("resnet50_ddp", "tracking/loggers=[tensorboard,wandb]")
    assert config.tracking.loggers.wandb.id == "bold_sky_12"
    assert config.tracking.loggers.tensorboard.version == ""
    assert config.tracking.logger is not None


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_library_is_refused_with_its_extra(composed: Compose, name: str, monkeypatch: Any) -> None:
    for library in (name, "tensorboardX"):
        monkeypatch.setitem(sys.modules, library, None)
    config = composed("resnet50_ddp", f"tracking={name}")
    assert config.tracking.logger._target_ is None
    with pytest.raises(RecipeError, match=rf"tracking\.loggers\.{name} is .*\[{name}\]'"):
        check_config(config)
