"""A class of the user's in place of a shipped one: what only the old one takes is left out, what he wrote is not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from lightning.pytorch.callbacks import LearningRateMonitor
from omegaconf import DictConfig, OmegaConf

from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.training import run as running
from azureml_strategy.training.app import run_recipe
from azureml_strategy.training.checks import check_config, target_nodes
from azureml_strategy.training.recipes import RecipeError, shipped_recipes
from azureml_strategy.training.targets import locate, loggers_and_callbacks, written_keys

PARTS = """\
from azureml_strategy.models import ImageClassifier


class Net:
    def __init__(self, width, learning_rate=1.0): ...


class Derived(ImageClassifier):
    def __init__(self, width=1, **others): ...


class Any:
    def __init__(self, width=1, **others): ...


def any_network(**others): ...
"""
_OF_EACH_MODEL = ("resnet50_ddp", "gpt_zero3", "finetune_lm")
Model = Callable[..., DictConfig]
Look = Callable[..., Any]


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Look]:
    """What a function sees of the configuration of a recipe, as `train` is about to make it."""
    (tmp_path / "own_nets.py").write_text(PARTS)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "grouped.yaml").write_text("_target_: own_nets.Net\nwidth: 4\n")
    monkeypatch.setattr(sys, "argv", ["azureml-strategy"])
    found: list[Any] = []

    def of(see: Callable[[DictConfig], Any], text: str, *overrides: str, recipe: str = "mine.yaml") -> Any:
        def train(config: DictConfig, command: str) -> dict[str, float]:
            running.drop_keys_of_old_targets(config)
            check_config(config)
            found.append(see(config))
            return {}

        monkeypatch.setattr(running, "train", train)
        (tmp_path / "mine.yaml").write_text(text)
        run_recipe(recipe, overrides)
        return found.pop()

    yield of
    sys.modules.pop("own_nets", None)


@pytest.fixture
def model(look: Look) -> Model:
    """The model of a recipe."""
    return partial(look, lambda config: config.model)


OWN = "defaults: [resnet50_ddp, _self_]\nmodel: {_target_: own_nets.Net, width: 8}\n"


def test_keys_of_the_old_one_are_left_out(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    assert model(OWN) == {"_target_": "own_nets.Net", "width": 8, "learning_rate": 0.08}
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "left out" in each]
    assert "model is own_nets.Net now, which takes none of the recipe's own" in line
    assert "network" in line


def test_on_the_command_line_of_a_shipped_recipe(model: Model) -> None:
    found = model("", "model._target_=own_nets.Net", "+model.width=3", recipe="resnet50_synthetic")
    assert found == {"_target_": "own_nets.Net", "width": 3, "learning_rate": 0.1}


def test_a_group_of_the_users(model: Model) -> None:
    found = model("defaults: [resnet50_ddp, {override model: grouped}, _self_]\n")
    assert found == {"_target_": "own_nets.Net", "width": 4, "learning_rate": 0.08}


def test_a_network_inside(model: Model) -> None:
    network = model("defaults: [resnet50_ddp, _self_]\nmodel: {network: {_target_: own_nets.Net, width: 8}}\n").network
    assert network == {"_target_": "own_nets.Net", "width": 8}
    network = model("defaults: [resnet50_ddp, _self_]\nmodel: {network: {_target_: own_nets.any_network}}\n").network
    assert network.keys() == {"_target_", "num_classes", "zero_init_residual"}


def test_one_that_takes_any_keyword(model: Model) -> None:
    """A derived class hands them on; another one would be given what it knows nothing of."""
    assert "warmup_epochs" in model("", "model._target_=own_nets.Derived", recipe="resnet50_ddp")
    assert model("", "model._target_=own_nets.Any", recipe="resnet50_ddp").keys() == {"_target_"}


@pytest.mark.parametrize(
    ("text", "overrides"),
    [(OWN.replace("width: 8", "widht: 8, width: 8"), []), (OWN, ["+model.widht=8"]), (OWN, ["+model={widht: 8}"])],
)
def test_a_key_that_the_user_wrote_stays_an_error(model: Model, text: str, overrides: list[str]) -> None:
    with pytest.raises(RecipeError, match=r"model.widht is set, but own_nets.Net takes no 'widht'.*'model.width'"):
        model(text, *overrides)


def test_base_run_has_neither_model_nor_data(model: Model) -> None:
    own = "defaults: [base_run, _self_]\nmodel: {_target_: own_nets.Net, width: 8}\ndata: {_target_: own_nets.Net}\n"
    assert model(own) == {"_target_": "own_nets.Net", "width": 8}
    with pytest.raises(RecipeError, match=r"model\._target_ has no value: .* Type model\._target_=MODULE\.CLASS"):
        model("", recipe="base_run")


@pytest.mark.parametrize(
    ("recipe", "override", "gone"),
    [
        ("gpt_diloco", "strategy=ddp", ["period", "warmup_steps"]),
        ("gpt_diloco", "strategy=lightning_ddp", ["period", "warmup_steps"]),
        ("gpt_pipeline", "strategy=ddp", ["partition"]),
        ("gpt_ddp", "data=synthetic", ["sequence_length"]),
    ],
)
def test_another_file_of_a_group_takes_the_recipes_keys_with_it(
    look: Look, capsys: pytest.CaptureFixture[str], recipe: str, override: str, gone: list[str]
) -> None:
    group, choice = override.split("=")
    own = f"defaults: [{recipe}, {{override {group}: {choice}}}, _self_]\n"
    for text, *overrides in ((own,), (f"defaults: [{recipe}, _self_]\n", override)):
        left = look(lambda config: config[group].keys(), text, *overrides)
        assert not left & set(gone)
        assert f"{', '.join(gone)}: left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(each.name, marks=() if each.name in _OF_EACH_MODEL else pytest.mark.exhaustive)
        for each in shipped_recipes()
        if each.name != "base_run"
    ],
)
def test_no_shipped_recipe_loses_a_key(look: Look, capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    needed = ["model.path=folder"] if recipe == "finetune_lm" else []
    look(lambda config: None, "", *needed, recipe=recipe)
    assert "left out" not in capsys.readouterr().out


def test_the_files_of_a_job_are_read_once_and_again_for_the_next(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find whose keys are whose takes as long as to compose the recipe."""
    read: list[object] = []
    wanted = ConfigLoaderImpl.compute_defaults_list

    def counted(*arguments: Any, **options: Any) -> Any:
        read.append(arguments)
        return wanted(*arguments, **options)

    monkeypatch.setattr(ConfigLoaderImpl, "compute_defaults_list", counted)

    own = []
    for number, key in enumerate(("seed", "+vars.other"), 1):
        written = look(lambda config: written_keys(), OWN, f"{key}=3")
        assert len(read) == number, "for the keys that were dropped, and for these"
        own.append("seed" in written.own)
    assert own == [True, False]


@pytest.mark.parametrize("tracking", ["console", "tensorboard", "wandb"])
def test_what_a_group_leaves_out_stays_out_whatever_a_recipe_says_of_it(
    look: Look, capsys: pytest.CaptureFixture[str], tracking: str
) -> None:
    own = "defaults: [resnet50_ddp, _self_]\ntracking: {logger: {run_name: mine}, lr_monitor: {log_momentum: true}}\n"
    loggers, callbacks = look(loggers_and_callbacks, own, f"tracking={tracking}", "tracking/loggers=[]")
    assert loggers == []
    assert any(isinstance(each, LearningRateMonitor) for each in callbacks) == (tracking != "console")
    assert "tracking.logger._target_ is null, which makes nothing, so that your run_name" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "overrides", "ours"),
    [
        ("", [], True),
        ("", ["model._target_=own_nets.Net", "+model.width=2"], True),
        ("", ["checkpoint.monitor=val/loss"], False),
        ("checkpoint: {monitor: val/loss}", [], False),
    ],
)
def test_a_monitor_of_ours_is_told_from_the_users(look: Look, text: str, overrides: list[str], ours: bool) -> None:
    """A training that logs none is stopped for the user's alone."""

    def see(config: DictConfig) -> bool:
        callbacks = loggers_and_callbacks(config)[1]
        running._tell_defaults(config, callbacks)
        (saver,) = (each for each in callbacks if isinstance(each, JobCheckpoint))
        return saver.monitor_is_default

    assert look(see, f"defaults: [resnet50_ddp, _self_]\n{text}\n", "tracking=console", *overrides) == ours


def test_a_configuration_that_no_application_composed_is_left_alone() -> None:
    config = OmegaConf.create({"model": {"_target_": "own_nets.Net", "depth": 1}})
    running.drop_keys_of_old_targets(config)
    assert "depth" in config.model


def test_a_section_whose_target_is_null_makes_nothing_whatever_is_beside_it() -> None:
    saving = {"_target_": None, "filename": "{step}", "monitor": "val/loss"}
    config = OmegaConf.create({"checkpoint": saving, "callbacks": {"mine": {"_target_": None}}})
    assert loggers_and_callbacks(config) == ([], [])
    assert list(target_nodes(config)) == []


def test_keys_whose_section_names_no_class() -> None:
    config = OmegaConf.create({"checkpoint": {"filename": "{step}", "monitor": "val/loss"}})
    with pytest.raises(
        RecipeError, match=r"checkpoint.filename is '{step}', but checkpoint has no _target_ that .*=null"
    ):
        loggers_and_callbacks(config)


def test_a_module_that_nobody_has_imported_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lightning.pytorch.demos.boring_classes", raising=False)
    monkeypatch.delattr("lightning.pytorch.demos", raising=False)
    monkeypatch.delitem(sys.modules, "lightning.pytorch.demos", raising=False)
    assert locate("model", "lightning.pytorch.demos.boring_classes.BoringModel").__name__ == "BoringModel"
