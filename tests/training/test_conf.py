"""The shipped YAML: every recipe and every option of every group composes, and fits what it configures."""

from __future__ import annotations

import inspect
from importlib.resources import files

import pytest
from hydra.utils import instantiate
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf
from tests.training.conftest import Compose

from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.training.checks import _TRAINER_ELSEWHERE, check_config
from azureml_strategy.training.recipes import shipped_recipes
from azureml_strategy.training.targets import loggers_and_callbacks

# What a user must say.
NEEDED = {"finetune_lm": ("model.path=folder",)}
RECIPES = [recipe.name for recipe in shipped_recipes() if recipe.name != "base_run"]  # which has no model yet
OPTIONS = [
    f"{group.name}={file.name.removesuffix('.yaml')}"
    for group in files("azureml_strategy.conf").iterdir()
    if group.is_dir() and group.name != "cluster"  # they differ by a name alone: tests/jobs/test_sizes.py
    for file in group.iterdir()
    if file.name.endswith(".yaml")
]


def assert_fits(config: DictConfig) -> None:
    check_config(config)
    OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_fits_what_it_configures(composed: Compose, recipe: str) -> None:
    config = composed(recipe, *NEEDED.get(recipe, ()))
    assert_fits(config)
    assert instantiate(config.strategy) is not None
    assert callable(instantiate(config.model).forward)
    loggers, callbacks = loggers_and_callbacks(config)
    assert len(loggers) == 1
    saves = any(isinstance(each, JobCheckpoint) for each in callbacks)
    assert saves == (recipe != "resnet50_synthetic"), "which is a benchmark"


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "resnet50_imagenet"])
def test_the_data_of_every_recipe_that_needs_none_of_the_users(composed: Compose, recipe: str) -> None:
    assert instantiate(composed(recipe, *NEEDED.get(recipe, ())).data) is not None


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_fits_into_a_recipe(composed: Compose, option: str) -> None:
    recipes = {
        "model=gpt": "gpt_ddp",
        "data=text": "gpt_ddp",
        "model=transf": "finetune_lm",
        "data=chat": "finetune_lm",
    }
    recipe = next((name for start, name in recipes.items() if option.startswith(start)), "resnet50_ddp")
    assert_fits(composed(recipe, *NEEDED.get(recipe, ()), option))


def test_every_argument_of_the_trainer_can_be_overridden_somewhere(composed: Compose) -> None:
    arguments = dict(inspect.signature(Trainer.__init__).parameters)
    assert composed("resnet50_ddp").trainer.keys() == arguments.keys() - {"self"} - _TRAINER_ELSEWHERE.keys()
    assert _TRAINER_ELSEWHERE.keys() < arguments.keys()


def test_the_cpu_option_makes_two_processes_of_any_recipe(composed: Compose) -> None:
    trainer = composed("resnet50_imagenet", "trainer=cpu").trainer
    assert (trainer.accelerator, trainer.devices, trainer.num_nodes) == ("cpu", 2, 1)


@pytest.mark.parametrize(
    ("overrides", "how"),
    [
        ([], "off"),
        (["compile=blocks"], "blocks"),
        (["compile=off"], "off"),
        (["compile=false"], "off"),
        (["strategy.compile=whole"], "whole"),
        (["compile=blocks", "strategy.compile=off"], "off"),
        (["compile=blocks", "strategy.compile=false"], "off"),
        (["compile=whole", "strategy.compile_mode=reduce-overhead"], "whole"),
    ],
)
@pytest.mark.parametrize("recipe", ["resnet50_ddp", "gpt_ddp"])
def test_what_a_recipe_compiles(composed: Compose, recipe: str, overrides: list[str], how: str) -> None:
    config = composed(recipe, *overrides)
    check_config(config)
    assert instantiate(config.strategy)._compilation.how == how


@pytest.mark.parametrize(
    ("recipe", "how"), [("resnet50_synthetic", "whole"), ("gpt_ddp", "blocks"), ("base_run", "off")]
)
def test_what_a_recipe_compiles_on_a_gpu(
    composed: Compose, monkeypatch: pytest.MonkeyPatch, recipe: str, how: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert composed(recipe).strategy.compile == how
    assert "compile" not in composed(recipe, "strategy=lightning_ddp").strategy  # which has no such key
