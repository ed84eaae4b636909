"""What a recipe makes for the Trainer: any object anywhere, callbacks and loggers alone, by name or in lists."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.profilers import SimpleProfiler
from omegaconf import DictConfig, OmegaConf
from tests.training.conftest import Compose

from azureml_strategy.training.checking import check_config
from azureml_strategy.training.errors import RecipeError
from azureml_strategy.training.objects import loggers_and_callbacks, make
from azureml_strategy.training.run import _trainer

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
    trainer = _trainer(config, None)
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
