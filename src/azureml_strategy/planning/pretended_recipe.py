"""The program of one pretended rank of a recipe: `python -m azureml_strategy.planning.pretended_recipe RECIPE ...`.

It trains the recipe as `azureml-strategy train` does, by `azureml_strategy.training.run.train`, with the configuration
of a machine with GPUs, and without what would be written.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence

import lightning.pytorch  # noqa: F401 - with it this process begins to pretend
from omegaconf import DictConfig, OmegaConf, open_dict

from azureml_strategy.planning.batches import data_section
from azureml_strategy.planning.pretending import report_error
from azureml_strategy.training.checks import compose_recipe
from azureml_strategy.training.recipes import find_recipe
from azureml_strategy.training.resolvers import register_resolvers
from azureml_strategy.training.run import train
from azureml_strategy.training.targets import own_modules


def compose_for_gpus(recipe: str, overrides: Sequence[str]) -> DictConfig:
    """Return a recipe's configuration as a machine with GPUs resolves it, without what compiles, records and saves.

    Raises:
        RecipeError: the recipe or an override is misspelt.
    """
    register_resolvers()
    config = compose_recipe(find_recipe(recipe), overrides)
    # Composing registers those that look at this machine.
    OmegaConf.register_new_resolver("azureml.by_device", lambda on_cpu, on_gpu: on_gpu, replace=True)
    OmegaConf.register_new_resolver("azureml.precision", lambda *_: "bf16-mixed", replace=True)
    with open_dict(config):
        del config["hydra"]
        config.output_dir = tempfile.gettempdir()
        config.resume = "never"
        config.compile = "off"
        for section in ("tracking", "checkpoint", "profile", "head_space", "callbacks"):
            config[section] = None
        for section in ("strategy", "model"):
            if "compile" in config[section]:
                config[section].compile = "off" if section == "strategy" else False
    return config


def main(arguments: Sequence[str]) -> None:
    """Take one step of a recipe as the rank that the environment says, and report it.

    Args:
        arguments: the recipe, then overrides.
    """
    recipe, *overrides = arguments
    with own_modules(find_recipe(recipe).folder):
        config = compose_for_gpus(recipe, overrides)
        with open_dict(config):
            config.data = data_section(config.data, int(os.environ["WORLD_SIZE"]))
        train(config)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BaseException as error:
        report_error(error)
        raise
