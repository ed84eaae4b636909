"""Finds recipes, and names near matches in its errors. Does not import Hydra, so that it answers at once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path


class RecipeError(ValueError):
    """A recipe or an override is wrong; the message names the near matches."""


def near_matches(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the known words nearest to the given one, or all of them if they are few."""
    words = {each.lower(): each for each in sorted(set(known))}
    plain = word.lower().removeprefix("standard_")  # Azure's name of a VM size: Standard_ND96isr_H100_v5
    near = get_close_matches(plain, words, n=3, cutoff=0.75)
    # `max_epoch` is near `trainer.max_epochs`, although most of the letters differ.
    last = plain.rsplit(".", 1)[-1]
    near += [each for each in words if each.rsplit(".", 1)[-1].startswith(last) and each not in near]
    if near:
        return f"Did you mean {' or '.join(repr(words[each]) for each in near[:4])}?"
    return f"Known: {', '.join(words.values())}." if len(words) <= 40 else ""


@dataclass(frozen=True)
class Recipe:
    """A whole run in one YAML file.

    Attributes:
        name: the name that `azureml-strategy train` accepts.
        folder: the folder of the file; None for a shipped recipe, which is on Hydra's search path already.
        summary: the first line of the file.
    """

    name: str
    folder: str | None
    summary: str


def shipped_recipes() -> list[Recipe]:
    """The recipes of this package, sorted by name."""
    found = [file for file in files("azureml_strategy.recipes").iterdir() if file.name.endswith(".yaml")]
    return sorted(
        (Recipe(file.name.removesuffix(".yaml"), None, _summary(file.read_text(encoding="utf-8"))) for file in found),
        key=lambda recipe: recipe.name,
    )


def find_recipe(recipe: str) -> Recipe:
    """Find a shipped recipe by its name, or the user's own by the path of its file.

    Raises:
        RecipeError: there is none, its file is not readable text or does not end in .yaml, or a shipped recipe would
            hide it.
    """
    shipped = {each.name: each for each in shipped_recipes()}
    if recipe in shipped:
        return shipped[recipe]
    path = os.path.abspath(recipe)
    other = _no_recipe(recipe)
    if other:
        raise RecipeError(other)
    if not os.path.isfile(path):
        own = [name for name in os.listdir() if name.endswith((".yaml", ".yml"))]
        raise RecipeError(
            f"There is no recipe {recipe!r}: it is neither the name of a shipped one nor a file. "
            f"{near_matches(recipe, [*shipped, *own])} `azureml-strategy recipes` lists the shipped ones; a recipe "
            "of your own starts from one of them, or from base_run with your own model and data."
        )
    folder, file = os.path.split(path)
    name, extension = os.path.splitext(file)
    if extension != ".yaml":
        raise RecipeError(f"{recipe} does not end in .yaml, which Hydra asks for. Rename it to {name}.yaml.")
    if name in shipped:
        raise RecipeError(
            f"{recipe} has the name of a shipped recipe, which Hydra would load instead. Rename it, to my_{file} say."
        )
    try:
        return Recipe(name, folder, _summary(Path(path).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{recipe} is no text that can be read: {error}. Give a YAML file in UTF-8.") from error


def _no_recipe(word: str) -> str:
    """What to type instead of a word that is no recipe's name, but something else that is known; empty for a name."""
    if word.endswith(".py"):
        return (
            f"{word} is a script, and a recipe is a YAML file. A script runs by python {word}, as a job of two nodes "
            f"on this machine by `azureml-strategy emulate --nodes 2 -- python {word}`, and in Azure ML by "
            f"`azureml-strategy submit {word} cluster=SIZE`."
        )
    if os.path.isdir(word):
        own = sorted(name for name in os.listdir(word) if name.endswith(".yaml"))
        paths = " or ".join(os.path.join(word, name) for name in own)
        named = f"Name a recipe in it: {paths}." if own else "It has no recipe; `azureml-strategy init` makes one."
        return f"{word} is a folder. {named}"
    if "=" in word:
        return f"{word} stands where the name of a recipe belongs. Type the recipe first: RECIPE {word}"
    return ""


def config_groups() -> dict[str, list[str]]:
    """The choices of each group of a configuration, such as `cluster`, sorted by name."""
    found = (folder for folder in files("azureml_strategy.conf").iterdir() if folder.is_dir())
    choices = {
        folder.name: sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))
        for folder in found
    }
    return {name: choices[name] for name in sorted(choices) if choices[name]}


def hidden_by(folder: str) -> list[str]:
    """The files of a folder that Hydra would load in place of ours of the same name, such as a `base.yaml`."""
    ours = [file.name for package in ("conf", "recipes") for file in files(f"azureml_strategy.{package}").iterdir()]
    return sorted(name for name in os.listdir(folder) if name.endswith(".yaml") and name in ours)


def _summary(text: str) -> str:
    first = text.lstrip().splitlines()[0] if text.strip() else ""
    return first.lstrip("# ") if first.startswith("#") else ""
