"""The command line of a job, and the folder of code in which it works."""

from __future__ import annotations

import os
import shlex

from azureml_strategy.jobs.errors import JobError
from azureml_strategy.jobs.recipe import JobRecipe


def code_folder(recipe: JobRecipe) -> str | None:
    """The folder that the job gets; None where it needs none.

    Raises:
        JobError: there is no such folder.
    """
    folder = recipe.job.code
    if folder is None:
        return "." if recipe.recipe.folder is not None or recipe.own_modules else None
    if not os.path.isdir(folder):
        raise JobError(f"job.code is {folder}, but there is no such folder.")
    return folder


def recipe_in_code(recipe: JobRecipe) -> str:
    """How the job finds the recipe: a shipped one by its name, the user's own by its path in the folder of code.

    Raises:
        JobError: the file lies elsewhere, where the job would not find it.
    """
    found = recipe.recipe
    if found.folder is None:
        return found.name
    folder = code_folder(recipe) or "."
    path = os.path.relpath(os.path.join(found.folder, f"{found.name}.yaml"), folder)
    if path.split(os.sep)[0] == os.pardir:
        raise JobError(
            f"The recipe {found.name}.yaml lies in {found.folder}, outside of {os.path.abspath(folder)}, which is all "
            "that the job gets. Call this from a folder above it, or name one: job.code=FOLDER."
        )
    return path if os.sep in path else os.path.join(os.curdir, path)


def command_line(recipe: JobRecipe) -> str:
    """What each process runs: the recipe with exactly the user's overrides, and the paths of the job.

    The user's words are quoted for the shell. Those that Azure ML completes are not: it writes a path in their place.
    """
    words = ["azureml-strategy", "train", recipe_in_code(recipe), *recipe.overrides]
    return " ".join([*map(shlex.quote, words), *recipe.paths])
