"""recipes: lists the shipped recipes."""

from __future__ import annotations

import argparse

from azureml_strategy.cli.verbs import Verbs, add_verb


def add_to(verbs: Verbs) -> None:
    """Add the verb."""
    add_verb(verbs, "recipes", _run, help="list the shipped recipes", description="List the shipped recipes.")


def _run(options: argparse.Namespace) -> int:
    from azureml_strategy.training.recipes import shipped_recipes

    for recipe in shipped_recipes():
        print(f"{recipe.name:22} {recipe.summary}")
    return 0
