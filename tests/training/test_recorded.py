"""A run tells no secret of its environment or its configuration: not on the console, in MLflow or in any file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mlflow import MlflowClient
from omegaconf import OmegaConf
from tests.training.conftest import COMMAND, TINY, files, run, the_run

from azureml_strategy.training.recorded import hyperparameters

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
