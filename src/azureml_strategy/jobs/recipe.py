"""Composes the recipe and overrides of a job, checks them, and says what the job runs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from azureml_strategy.command_line import with_lists
from azureml_strategy.jobs.expected import expect_job
from azureml_strategy.jobs.hyperparameters import AUTOTUNING, Sweep, autotuning_parameters
from azureml_strategy.jobs.inputs import path_overrides
from azureml_strategy.jobs.plan import (
    JobPlan,
    check_code,
    check_words,
    override_texts,
    refuse_secret_settings,
    refuse_secrets,
)
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.jobs.settings import ClusterSettings, JobSettings, read_section
from azureml_strategy.tracking.expected import ExpectedRate
from azureml_strategy.tracking.source import recipe_run_name
from azureml_strategy.training.checks import compose_recipe, target_nodes
from azureml_strategy.training.recipes import Recipe, RecipeError, find_recipe, near_matches
from azureml_strategy.training.resolvers import register_resolvers


@dataclass(frozen=True)
class JobRecipe:
    """A recipe, its overrides and the settings of its job.

    Attributes:
        overrides: the user's overrides, unchanged.
        paths: further overrides, which give the run the paths of the job's inputs and outputs.
        own_modules: whether the recipe names a module of the current folder, so that the job needs that folder.
        sweep: the search whose trials run this; None for one job.
    """

    recipe: Recipe
    overrides: tuple[str, ...]
    paths: tuple[str, ...]
    cluster: ClusterSettings
    job: JobSettings
    own_modules: bool = False
    sweep: Sweep | None = None

    @property
    def path(self) -> str:
        """How this machine finds the recipe: a shipped one by its name, the user's own by its path."""
        found = self.recipe
        return found.name if found.folder is None else os.path.join(found.folder, f"{found.name}.yaml")

    def plan(self) -> JobPlan:
        """What the job runs.

        Raises:
            JobError: the folder of code is missing, or the recipe lies outside of it.
        """
        return JobPlan(
            name=self.recipe.name,
            command=command_line(self),
            cluster=self.cluster,
            job=self.job,
            code=code_folder(self),
            needs=None if self.recipe.folder is None else recipe_in_code(self),
            tags={"recipe": self.recipe.name},
            notes=self.sweep.warnings() if self.sweep else (),
            expect=self._expect(),
            sweep=self.sweep,
            title=recipe_run_name(self.recipe.name, self.overrides),
        )

    def _expect(self) -> Callable[[], ExpectedRate | None] | None:
        """What predicts the job's rate; None for trials, which differ, and for a job that gets nothing of ours."""
        if self.sweep is not None or self.job.plain:
            return None
        return partial(expect_job, self.path, self.overrides, self.cluster)


def plan_recipe(recipe: str, overrides: Sequence[str], sweep: Sweep | None = None) -> JobPlan:
    """What the job of a recipe runs; see `read_recipe`."""
    return read_recipe(recipe, overrides, sweep).plan()


def read_recipe(recipe: str, overrides: Sequence[str], sweep: Sweep | None = None) -> JobRecipe:
    """Compose a recipe, by its name or the path of its file, and read its `cluster` and `job` sections.

    Raises:
        JobError: the recipe, an override or a key is misspelt, or the overrides contain a sweep, a flag of Hydra or a
            secret.
    """
    from azureml_strategy.training.targets import lies_in, refuse_missing  # Lightning, which a script's job needs not

    register_resolvers()
    overrides = with_lists(overrides)
    check_words(overrides)
    try:
        found = find_recipe(recipe)
        config = compose_recipe(found, overrides)
        named = [(place, str(node["_target_"])) for place, node in target_nodes(config)]
        for place, target in named:
            refuse_missing(place, target)
    except RecipeError as error:
        raise JobError(str(error)) from error
    refuse_secrets(dict(_leaves(config)))
    cluster, job = read_section(config, "cluster", ClusterSettings), read_section(config, "job", JobSettings)
    refuse_secret_settings(job)
    paths = path_overrides(job, overrides)
    for path in paths:
        check_key(config, path.partition("=")[0], "is to get a path of the job")
    own_modules = any(lies_in(os.curdir, target) for _, target in named)
    if sweep is not None:
        both = [each.key for each in sweep.parameters if each.key in override_texts(overrides)]
        if both:
            raise JobError(f"--sweep varies {both[0]}, and an override sets it too. Leave one of the two out.")
        sweep = _complete_sweep(sweep, config)
        paths = [*paths, *_trial_overrides(sweep, config)]
    return JobRecipe(found, tuple(overrides), tuple(paths), cluster, job, own_modules, sweep)


def _complete_sweep(sweep: Sweep, config: DictConfig) -> Sweep:
    """Take the metric and the goal from the recipe's checkpoints, and DeepSpeed's tuning space from its strategy."""
    if any(each.kind == AUTOTUNING for each in sweep.parameters):
        named = [each for each in sweep.parameters if each.kind != AUTOTUNING]
        strategy = config.strategy
        stage = strategy.get("stage") if "DeepSpeed" in str(strategy.get("_target_")) else None
        if stage is None or OmegaConf.select(config, "data.batch_size") is None:
            raise JobError(
                "--sweep autotuning tries DeepSpeed's settings of a ZeRO stage, and this recipe's strategy has none. "
                "Take strategy=deepspeed_stage_2, say, and data with a batch_size."
            )
        tuned = autotuning_parameters(stage, int(config.data.batch_size))
        parameters = {each.key: each for each in [*tuned, *named]}
        sweep = replace(sweep, parameters=tuple(parameters.values()))
        best: tuple[str | None, str] = ("throughput/samples_per_second", "max")
    else:
        saving = config.get("checkpoint") or {}
        best = saving.get("monitor"), saving.get("mode") or "min"
    if sweep.metric is not None:
        return sweep
    return replace(sweep, metric=best[0], goal=sweep.goal or ("maximize" if best[1] == "max" else "minimize"))


def _trial_overrides(sweep: Sweep, config: DictConfig) -> list[str]:
    """The overrides that give a trial its hyperparameters; Azure ML writes the values into the command."""
    words = []
    for parameter in sweep.parameters:
        key = parameter.key
        section = OmegaConf.select(config, key.rpartition(".")[0]) if "." in key else config
        known_to_class = isinstance(section, DictConfig) and "_target_" in section
        if not known_to_class:  # a class may take more arguments than the recipe names
            check_key(config, key, "is to be varied")
        words.append(f"++{key}=${{{{search_space.{parameter.name}}}}}")
    return words


def code_folder(recipe: JobRecipe) -> str | None:
    """The folder of code that the job gets; None if it needs none.

    Raises:
        JobError: `job.code` is not a folder.
    """
    if recipe.job.code is None:
        return "." if recipe.recipe.folder is not None or recipe.own_modules else None
    return check_code(recipe.job.code)


def recipe_in_code(recipe: JobRecipe) -> str:
    """How the job finds the recipe: a shipped one by its name, the user's own by its path in the folder of code.

    Raises:
        JobError: the recipe lies outside the folder of code, so that the job would not find it.
    """
    found = recipe.recipe
    if found.folder is None:
        return found.name
    folder = code_folder(recipe) or "."
    path = os.path.relpath(recipe.path, folder)
    if path.split(os.sep)[0] == os.pardir:
        raise JobError(
            f"The recipe {found.name}.yaml lies in {found.folder}, outside of {os.path.abspath(folder)}, which is all "
            "that the job gets. Call this from a folder above it, or name one: job.code=FOLDER."
        )
    return path if os.sep in path else os.path.join(os.curdir, path)


def command_line(recipe: JobRecipe) -> str:
    """The command of each process: `train` with the recipe, the user's overrides and the paths of the job.

    The user's words are quoted for the shell. The paths are not, because Azure ML replaces their placeholders.
    """
    words = ["azureml-strategy", "train", recipe_in_code(recipe), *recipe.overrides]
    return " ".join([*map(shlex.quote, words), *recipe.paths])


def check_key(config: DictConfig, key: str, why: str) -> None:
    """Refuse a key with dots that the composed recipe does not have: the job would fail at it.

    Raises:
        JobError: the recipe has no such key; the message names the near matches.
    """
    section, _, name = key.rpartition(".")
    node = OmegaConf.select(config, section) if section else config
    if not isinstance(node, DictConfig) or name not in node:
        known = [f"{section}.{each}".lstrip(".") for each in map(str, node)] if isinstance(node, DictConfig) else []
        raise JobError(f"{key} {why}, but the recipe has no such key. {near_matches(key, known)}")


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text of the recipe with its key, interpolations unresolved: the file is uploaded with the code."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node, resolve=False)
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, list):
        for each in node:
            yield from _leaves(each, path)
    elif isinstance(node, dict):
        for name, child in node.items():
            if path or name != "hydra":  # the section hydra repeats every override
                yield from _leaves(child, f"{path}.{name}" if path else str(name))
