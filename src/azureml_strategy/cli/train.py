"""train RECIPE: trains a recipe as one run, or as a sweep; recipes: lists the shipped ones."""

from __future__ import annotations

import argparse
import textwrap

from azureml_strategy.cli.verbs import Verbs, add_recipe_arguments, add_verb, fail

_DESCRIPTION = "Train a recipe: a shipped one by name, or your own YAML file by path."
_EPILOG = """\
examples:
  azureml-strategy train resnet50_ddp trainer.max_epochs=1 data.batch_size=64
  azureml-strategy train my_recipe.yaml          # starts with: defaults: [resnet50_ddp, _self_]
  azureml-strategy train my_model.yaml           # a model of your own: defaults: [base_run, _self_]; docs/own_model.md
  azureml-strategy train resnet50_ddp --cfg job  # print the configuration and stop
  azureml-strategy train resnet50_ddp -m model.learning_rate=0.1,0.2
  azureml-strategy train resnet50_ddp -m seed=1,2 hydra/launcher=azureml cluster=nc24ads_a100_v4  # a job for each
"""


def add_to(verbs: Verbs) -> None:
    """Add both verbs, and the options of `train`."""
    usage = "azureml-strategy train RECIPE [KEY=VALUE ...]"
    verb = add_verb(verbs, "train", _train, "train a recipe", _DESCRIPTION, _EPILOG, usage=usage)
    verb.details = _choices
    verb.about_options = "Hydra's flags follow the recipe: azureml-strategy train RECIPE -m seed=1,2."
    add_recipe_arguments(
        verb, nargs=argparse.REMAINDER, help="what to change, in Hydra's notation; Hydra's own flags work too"
    )
    add_verb(verbs, "recipes", _list, "list the shipped recipes")


def _choices() -> str:
    """The groups of a configuration with their choices, and the recipes."""
    from azureml_strategy.training.recipes import config_groups, shipped_recipes

    groups = [_wrapped(name, ", ".join(choices)) for name, choices in config_groups().items()]
    recipes = [_wrapped(recipe.name, recipe.summary) for recipe in shipped_recipes()]
    return "\n".join(["groups, each GROUP=CHOICE:", *groups, "", "recipes:", *recipes, ""])


def _wrapped(name: str, text: str) -> str:
    return textwrap.fill(text, 118, initial_indent=f"  {name:22}", subsequent_indent=" " * 24)


def _train(options: argparse.Namespace) -> int | None:
    from azureml_strategy.training.app import run_recipe
    from azureml_strategy.training.recipes import RecipeError

    try:
        run_recipe(options.recipe, options.overrides)
    except RecipeError as error:
        return fail(error)
    return None


def _list(options: argparse.Namespace) -> None:
    from azureml_strategy.training.recipes import shipped_recipes

    for recipe in shipped_recipes():
        print(f"{recipe.name:22} {recipe.summary}")
