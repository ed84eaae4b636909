"""What a recipe's run shows of itself: name, recipe, overrides, command, git commit and configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from azureml_strategy.cluster.redaction import redact
from azureml_strategy.command_line import as_typed
from azureml_strategy.tracking.source import (
    COMMAND_TAG,
    OVERRIDES_TAG,
    RECIPE_TAG,
    command_text,
    git_tags,
    recipe_run_name,
    script_command,
    script_run_name,
)

ARTIFACT = "config.yaml"


def page_name() -> str:
    """A run's name: the recipe and its overrides, or the script's name where Hydra runs no application."""
    if not HydraConfig.initialized():
        return script_run_name()
    hydra = HydraConfig.get()
    return recipe_run_name(str(hydra.job.config_name), as_typed(hydra.overrides.task))


def page_tags(command: str | None) -> dict[str, str]:
    """Tags of the run: recipe, overrides, command line and git commit. It asks git, so call it on one rank.

    Args:
        command: the command line that repeats the run; by default that of this process.
    """
    if not HydraConfig.initialized():
        return {}
    hydra = HydraConfig.get()
    # The folder of the recipe, if it is the user's and in a checkout, else the working folder.
    own = [
        Path(each.path)
        for each in hydra.runtime.config_sources
        if each.schema == "file" and each.provider in ("main", "command-line")
    ]
    return {
        RECIPE_TAG: str(hydra.job.config_name),
        OVERRIDES_TAG: command_text(as_typed(hydra.overrides.task)),
        COMMAND_TAG: command or script_command(),
        **next(filter(None, map(git_tags, [*own, Path(hydra.runtime.cwd)])), {}),
    }


def config_text(recorded: dict[str, Any]) -> str:
    """A configuration as YAML, without secrets."""
    return str(OmegaConf.to_yaml(OmegaConf.create(redact("", recorded), flags={"allow_objects": True})))
