"""Refuses misspelt recipes, overrides and keys before anything is built."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from importlib.util import find_spec
from typing import Any

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.lazy import missing_extra
from azureml_strategy.training.recipes import Recipe, RecipeError, hidden_by, near_matches

# The keys of a recipe; `vars` is for the user.
SECTIONS = (
    *("seed", "matmul_precision", "compile", "output_dir", "resume", "global_batch", "num_classes", "vars"),
    *("model", "data", "trainer", "strategy", "tracking", "checkpoint", "callbacks", "profile", "head_space"),
    *("cluster", "job"),  # settings of a submitted job; `train` only records them
)
# Arguments of the Trainer that other sections set.
_TRAINER_ELSEWHERE = {
    "strategy": "the `strategy` section",
    "logger": "`tracking.logger`",
    "callbacks": "the `callbacks` section",
    "enable_checkpointing": "the `checkpoint` section",
    "enable_progress_bar": "`tracking.progress_bar`",
    "default_root_dir": "`output_dir`",
}
# Loggers of these names need one of the libraries.
_LIBRARIES = {
    "TensorBoardLogger": ("tensorboard", "tensorboardX"),
    "JobWandbLogger": ("wandb",),
    "WandbLogger": ("wandb",),
}
# What Hydra raises if a configuration cannot be composed.
_UNCOMPOSABLE = (HydraException, OmegaConfBaseException, YAMLError, RecursionError)
# Every run needs these sections.
_NEEDED = ("model", "data", "trainer", "strategy", "tracking")


def check_overrides(recipe: Recipe, overrides: Sequence[str]) -> DictConfig:
    """Compose the recipe with the overrides, as Hydra is about to, and return the unresolved configuration.

    Of a sweep, its first job is composed, and the recipe with each further choice of a group. Otherwise a misspelt one
    would be found only when the jobs before it are over.

    Raises:
        RecipeError: Hydra refuses; the message names the override and its near matches.
    """
    swept = [_choices(each) for each in overrides]
    config = compose_recipe(recipe, [first for _, choices in swept if (first := next(choices, None)) is not None])
    for key, choices in swept:
        for choice in choices if key in config.hydra.runtime.choices else ():
            compose_recipe(recipe, [choice])
    return config


def compose_recipe(recipe: Recipe, overrides: Sequence[str]) -> DictConfig:
    """Compose the recipe with the overrides and Hydra's own section, and leave everything unresolved.

    Raises:
        RecipeError: Hydra refuses; the message names the override and its near matches.
    """
    folder, overrides = recipe.folder, list(overrides)
    with _initialized(folder):
        try:
            config = compose(recipe.name, overrides, return_hydra_config=True)
        except _UNCOMPOSABLE as error:
            raise RecipeError(_explain(recipe, overrides, error)) from error
        missing = [name for name in _NEEDED if config.get(name) is None]
        if missing:
            raise RecipeError(
                f"Recipe {recipe.name!r} has no {' and no '.join(missing)}.{_hiding(recipe)} A recipe starts from "
                "another one: write `defaults: [base_run, _self_]` at its top, or a shipped recipe's name in place of "
                "base_run; `azureml-strategy recipes` lists them."
            )
        return config


def compose_settings(overrides: Sequence[str]) -> DictConfig:
    """Compose the sections `cluster` and `job` alone, for the job of a program that is no recipe.

    Raises:
        RecipeError: Hydra refuses; the message names the override and its near matches.
    """
    settings = Recipe("program", None, "")
    with _initialized(None):
        try:
            return compose(settings.name, list(overrides))
        except _UNCOMPOSABLE as error:
            raise RecipeError(_explain(settings, overrides, error)) from error


def _initialized(folder: str | None) -> AbstractContextManager[None]:
    # Not `initialize`, which reads the source of each module on the stack to find its caller.
    if folder:
        return initialize_config_dir(folder, version_base="1.3")
    return initialize_config_module("azureml_strategy.recipes", version_base="1.3")


def _hiding(recipe: Recipe) -> str:
    """Return a hint about files of the user that Hydra takes in place of ours."""
    hidden = hidden_by(recipe.folder) if recipe.folder else []
    if not hidden:
        return ""
    return (
        f" {recipe.folder} has {' and '.join(hidden)}, and Hydra takes this in place of the file of the same name that "
        f"recipes start from. Rename it, to my_{hidden[0]} say."
    )


def _choices(text: str) -> tuple[str, Iterator[str]]:
    """Return the key of an override, and the override as each job of a sweep has it.

    There is none for what only the sweeper can expand, such as `glob(*)`.
    """
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise RecipeError(redact_text(f"The override {text!r} is not in Hydra's notation: {error}")) from error
    key = override.get_key_element()
    if not override.is_sweep_override():
        return key, iter([text])
    if isinstance(override.value(), Glob) or not override.is_discrete_sweep():
        return key, iter(())
    return key, (f"{key}={choice}" for choice in override.sweep_string_iterator())


def check_config(config: DictConfig) -> None:
    """Refuse sections that nothing reads, and arguments that no constructor takes, in a composed configuration.

    Raises:
        RecipeError: there is such a key; the message names its near matches.
    """
    for name in config:
        if name not in SECTIONS:
            raise RecipeError(
                f"The recipe has a section {name!r}, which nothing reads. {near_matches(str(name), SECTIONS)} "
                "Values of your own that others refer to belong under `vars`."
            )
    _check_trainer(config.trainer)
    for path, node in target_nodes(config):
        _check_library(path, node)
        _check_arguments(path, node)


def _check_trainer(trainer: DictConfig) -> None:
    from lightning.pytorch import Trainer

    known = set(inspect.signature(Trainer.__init__).parameters) - set(_TRAINER_ELSEWHERE) - {"self"}
    for name in map(str, trainer):
        if name in _TRAINER_ELSEWHERE:
            raise RecipeError(f"trainer.{name} is set, but comes from {_TRAINER_ELSEWHERE[name]}. Set it there.")
        if name not in known:
            near = near_matches(f"trainer.{name}", [f"trainer.{each}" for each in known])
            raise RecipeError(f"trainer.{name} is set, but Lightning's Trainer takes no {name!r}. {near}")


def _check_library(path: str, node: dict[str, Any]) -> None:
    """Refuse a logger whose library is missing. Lightning would do so only after model and data are made."""
    libraries = _LIBRARIES.get(str(node["_target_"]).rpartition(".")[2], ())
    if libraries and not any(map(find_spec, libraries)):
        advice = missing_extra(ModuleNotFoundError(name=libraries[0]))
        raise RecipeError(f"{path} is {node['_target_']}, but {advice}")


def _check_arguments(path: str, node: dict[str, Any]) -> None:
    from azureml_strategy.training.targets import HYDRA_OWN, locate, taken_by  # Lightning, for seconds

    if "${" in str(node["_target_"]):
        return  # known only at run time, when Hydra refuses what is wrong
    taken = taken_by(locate(path, node["_target_"]))
    if taken is None:
        return
    for name in node:
        if name not in taken and name not in HYDRA_OWN:
            near = near_matches(f"{path}.{name}", [f"{path}.{each}" for each in taken])
            raise RecipeError(f"{path}.{name} is set, but {node['_target_']} takes no {name!r}. {near}")


def target_nodes(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and content of every node with a `_target_` that is not null. Values stay unresolved."""
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=False)
    if isinstance(node, list):
        for number, child in enumerate(node):
            yield from target_nodes(child, f"{path}[{number}]")
    if not isinstance(node, dict):
        return
    if node.get("_target_") is not None:
        yield path, node
    for name, child in node.items():
        yield from target_nodes(child, f"{path}.{name}" if path else str(name))


def _explain(recipe: Recipe, overrides: Sequence[str], error: Exception) -> str:
    """Return Hydra's own message, with the near matches of the first override that is impossible."""
    if isinstance(error, RecursionError):
        again = _hiding(recipe) or " Look at the `defaults` of its files."
        return f"Recipe {recipe.name!r} cannot be composed: a file starts from itself.{again}"
    words = str(error).split("\nSee ")[0].strip()
    try:
        plain = compose(recipe.name)
    except _UNCOMPOSABLE:
        plain = OmegaConf.create()
    known = list(_keys(plain))
    for override in _readable(overrides):
        near = _near_override(override, known)
        if near:
            words = words.split("\nAvailable options in ")[0]  # the near ones are named, the search path helps nobody
            return f"The override {override.input_line!r} does not fit recipe {recipe.name!r}. {near}\n{words}"
    return f"Recipe {recipe.name!r} cannot be composed: {words}{_hiding(recipe)}"


def _readable(overrides: Sequence[str]) -> Iterator[Override]:
    """The overrides that Hydra can read; of another one its own message tells."""
    for each in (text for text in overrides if "=" in text):
        with suppress(HydraException):
            yield OverridesParser.create().parse_override(each)


def _near_override(override: Override, known: list[str]) -> str:
    key = override.get_key_element().lstrip("+~").split("@")[0]
    options = GlobalHydra.instance().config_loader().get_group_options(key)
    if options:
        value = override.value()
        wrong = [each for each in map(str, value if isinstance(value, list) else [value]) if each not in options]
        return near_matches(wrong[0], options) if wrong else ""
    if override.is_add() or override.is_force_add() or key in known or key.startswith("hydra."):
        return ""
    return near_matches(key, known)


def _keys(node: Any, path: str = "") -> Iterator[str]:
    """Every key of the configuration, in dotted form."""
    if not isinstance(node, DictConfig):
        return
    for name in map(str, node):
        here = f"{path}.{name}" if path else name
        yield here
        if not OmegaConf.is_missing(node, name) and not OmegaConf.is_interpolation(node, name):
            yield from _keys(node._get_node(name), here)
