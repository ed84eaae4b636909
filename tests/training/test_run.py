from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.profilers import SimpleProfiler
from mlflow import MlflowClient
from omegaconf import DictConfig, OmegaConf
from tests.training.conftest import COMMAND, TINY, Compose, files, run, the_run

from azureml_strategy.training.checks import check_config
from azureml_strategy.training.recipes import RecipeError
from azureml_strategy.training.run import _trainer, hyperparameters
from azureml_strategy.training.targets import loggers_and_callbacks, make

IN_ENVIRONMENT = {
    "HF_TOKEN": "hf_" + "aB3" * 11,
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",  # of the form of a commit's hash
    "DB_PASSWORD": "correct horse/battery 9",
    "HARMLESS": "ghp_" + "x1Y" * 12,
    "AZURE_STORAGE_CONNECTION_STRING": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=bm90IGEga2V5;",
}
IN_CONFIG = {"api_key": "literal-in-config-0815", "hook": "https://hooks.slack.com/services/T0/B0/" + "X" * 24}
OPAQUE = "opaque-by-interpolation"
SECRETS = [*IN_ENVIRONMENT.values(), IN_CONFIG["api_key"], "X" * 24, OPAQUE, "bm90IGEga2V5", "url-password-9"]
RECIPE = f"""\
# Mine.
defaults: [resnet50_synthetic, _self_]
vars:
  api_key: {IN_CONFIG["api_key"]}
  hook: {IN_CONFIG["hook"]}
  opaque: ${{oc.env:OPAQUE}}
  store: postgresql://me:${{oc.env:DB_PASSWORD}}@host/db
  workers: ${{oc.env:WORKERS,2}}
  twice: ${{vars.opaque}}
callbacks:
  telling: {{_target_: telling.Telling, api_key: "${{vars.api_key}}", hook: "${{vars.hook}}"}}
"""
CALLBACK = """\
import logging, os, sys, warnings
from lightning.pytorch import Callback

class Telling(Callback):
    def __init__(self, api_key, hook):
        self.told = [os.environ[name] for name in VARIABLES] + [api_key, hook]

    def on_train_batch_end(self, trainer, *_):
        print(*self.told)
        warnings.warn(" ".join(self.told))
        logging.getLogger("mine").warning("told %s", self.told)
        for logger in trainer.loggers:
            logger.log_hyperparams({"mine": {"told": " ".join(self.told), "password": "literal-in-code"}})
            logger.log_tags({"told": " ".join(self.told)}) if trainer.is_global_zero else None
        if trainer.global_rank == 1:
            raise RuntimeError(f"refused: {self.told}") from ValueError(self.told[0])
""".replace("VARIABLES", repr(list(IN_ENVIRONMENT)))


def leaks(output: str) -> list[str]:
    """Which secrets stand in the output, or in any file below this folder but those that hold them on purpose."""
    given = {Path("mine.yaml"), Path("telling.py")}
    written = [path.read_bytes() for path in Path().rglob("*") if path.is_file() and path not in given]
    return [each for each in SECRETS if any(each.encode() in content for content in [output.encode(), *written])]


def test_a_run_that_fails_with_them_tells_none(store: MlflowClient) -> None:
    Path("mine.yaml").write_text(RECIPE)
    Path("telling.py").write_text(CALLBACK)
    variables = {**IN_ENVIRONMENT, "OPAQUE": OPAQUE, "PYTHONPATH": str(Path.cwd()), "PYTHONWARNINGS": "default"}
    command = [
        COMMAND,
        "emulate",
        "--nodes",
        "2",
        "--",
        COMMAND,
        "train",
        "mine.yaml",
        "++vars.db.password=by-override",
    ]
    done = run(*command, *TINY, "hydra.job_logging.root.handlers=[console,file]", check=False, variables=variables)
    assert done.returncode != 0
    assert "refused: " in done.stdout, done.stdout
    assert "<redacted>" in done.stdout
    assert files("outputs/**/*.log"), "a file of Hydra's log is looked through as well"
    recorded = the_run(store)
    assert "RuntimeError: refused" in recorded.data.tags["failed.attempt_0"]
    params = recorded.data.params
    assert params["vars/opaque"] == "${oc.env:OPAQUE}"
    assert params["vars/twice"] == "${vars.opaque}"
    assert params["vars/workers"] == "${oc.env:WORKERS,2}"
    assert params["vars/api_key"] == params["vars/db/password"] == params["mine/password"] == "<redacted>"
    assert params["vars/hook"] == "https://hooks.slack.com/services/<redacted>"
    (kept,) = Path().glob("outputs/**/.hydra/config.yaml")
    assert "opaque: ${oc.env:OPAQUE}" in kept.read_text()
    assert not leaks(done.stdout)
    assert "by-override" not in done.stdout + "".join(path.read_text() for path in kept.parent.iterdir())


def test_a_password_of_the_store_s_address_is_not_told() -> None:
    store = {"MLFLOW_TRACKING_URI": "http://me:url-password-9@127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    store["PYTHONWARNINGS"] = "default::UserWarning"  # which name the store
    done = run(COMMAND, "train", "resnet50_synthetic", *TINY, "output_dir=run", variables=store)
    assert "127.0.0.1" in done.stdout
    assert not leaks(done.stdout)
    assert list(Path("run").glob("*.unsent.jsonl")), "which were searched as well"


def test_hyperparameters_are_resolved_but_for_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATE", "0.1")
    config = OmegaConf.create(
        {
            "model": {
                "rate": "${oc.decode:${oc.env:RATE}}",
                "width": "${vars.width}",
                "more": ["${vars.width}", "???"],
            },
            "vars": {"width": 4, "place": "/data/${oc.env:RATE}", "indirect": "${vars.place}"},
            "job": {"tags": {}},
        }
    )
    assert hyperparameters(config) == {
        "model": {"rate": "${oc.decode:${oc.env:RATE}}", "width": 4, "more": [4, "???"]},
        "vars": {"width": 4, "place": "/data/${oc.env:RATE}", "indirect": "${vars.place}"},
    }
    assert OmegaConf.create({"rate": "${oc.env:RATE}"}).rate == os.environ["RATE"], "as before"


EARLY = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val/top1"}
TIMER = {"_target_": "lightning.pytorch.callbacks.Timer", "duration": "00:01:00:00"}
CSV = {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": "csv"}


def kinds(**sections: Any) -> list[list[type]]:
    return [[type(each) for each in made] for made in loggers_and_callbacks(OmegaConf.create(sections))]


@pytest.mark.parametrize(
    "callbacks",
    [
        {"early": EARLY, "none": None, "timer": TIMER},
        [EARLY, None, TIMER],
        {"early": EARLY, "more": [None, TIMER]},
        [{"early": EARLY, "timer": TIMER}],
    ],
)
def test_callbacks_by_name_or_in_a_list(callbacks: Any) -> None:
    assert kinds(callbacks=callbacks) == [[], [EarlyStopping, Timer]]


@pytest.mark.parametrize(
    "tracking",
    [
        {"logger": {"one": CSV, "two": CSV, "none": None}},
        {"logger": [CSV, None, CSV]},
        {"logger": CSV, "csv": CSV},
        {"logger": None, "mine": [CSV, CSV], "early": None},
    ],
)
def test_several_loggers(tracking: Any) -> None:
    assert kinds(tracking=tracking, checkpoint=None) == [[CSVLogger] * 2, []]


@pytest.mark.parametrize("callbacks", [None, {}, []])
def test_no_callbacks(callbacks: Any) -> None:
    assert kinds(callbacks=callbacks) == [[], []]


def test_objects_anywhere_in_the_trainer(composed: Compose) -> None:
    config = composed(
        "resnet50_synthetic",
        "trainer=cpu",
        "tracking=console",
        "strategy=lightning_ddp",
        "output_dir=out",
        "trainer.profiler={_target_: lightning.pytorch.profilers.SimpleProfiler, dirpath: here}",
        "trainer.plugins=[{_target_: lightning.pytorch.plugins.environments.LightningEnvironment}]",
        "trainer.max_time={hours: 2}",
        f"callbacks=[{{_target_: {ModelCheckpoint.__module__}.ModelCheckpoint}}]",
    )
    check_config(config)
    trainer = _trainer(config, None, None)
    assert isinstance(trainer.profiler, SimpleProfiler)
    assert trainer.profiler.dirpath == "here"
    assert type(trainer.strategy.cluster_environment) is LightningEnvironment  # type: ignore[attr-defined]
    assert any(isinstance(each, ModelCheckpoint) for each in trainer.callbacks)  # type: ignore[attr-defined]


def test_a_key_that_an_object_in_a_list_does_not_take(composed: Compose) -> None:
    config = composed("resnet50_synthetic", "callbacks=[{_target_: lightning.pytorch.callbacks.Timer, durations: 1}]")
    with pytest.raises(RecipeError, match=r"callbacks\[0\]\.durations is set, .*'callbacks\[0\]\.duration'"):
        check_config(config)


@pytest.mark.parametrize("node", [{"_target_": "collections.Counter"}, {"monitor": "val/top1"}, "early", CSV])
def test_what_is_no_callback_is_refused_instead_of_left_out(node: Any) -> None:
    with pytest.raises(RecipeError, match=r"callbacks\.early makes a \w+, which is no callback"):
        kinds(callbacks={"early": node})


def refuse(width: int) -> None:
    raise ValueError(f"width={width},\nbut it must be even.")


def test_why_something_cannot_be_made_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    node: DictConfig = OmegaConf.create({"outer": {"_target_": f"{__name__}.refuse", "width": 3}})
    with pytest.raises(RecipeError, match=r"model cannot be made\. ValueError: width=3, but .* \(.*test_run.py, line"):
        make("model", node)
    with pytest.raises(RecipeError, match=r"model cannot be made.*nowhere"):
        make("model", OmegaConf.create({"a": "${nowhere.b}"}))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(Exception, match="Error in call to target"):
        make("model", node)
