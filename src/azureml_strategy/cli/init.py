"""init [FOLDER]: makes a folder with a script, a recipe and the commands to run them."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from azureml_strategy.cli.verbs import Verbs, add_verb, fail

_DESCRIPTION = """\
Make a folder to start from: train.py, a plain script of Lightning; my_model.py, its model and data; recipe.yaml, the
same training as a recipe; requirements.txt; README.md with the commands. No file is overwritten.
"""
_EPILOG = """\
examples:
  azureml-strategy init my_project
  azureml-strategy init             # in the current folder
"""


def add_to(verbs: Verbs) -> None:
    """Add the verb and its argument."""
    verb = add_verb(
        verbs, "init", _run, "make a folder with a script and a recipe to start from", _DESCRIPTION, _EPILOG
    )
    verb.add_argument("folder", nargs="?", type=Path, default=Path("."), metavar="FOLDER", help="default: this one")


def _run(options: argparse.Namespace) -> int | None:
    from importlib.resources import files

    folder: Path = options.folder
    project = files("azureml_strategy").joinpath("project")
    contents = {file.name: file.read_bytes() for file in project.iterdir() if file.is_file()}
    existing = sorted(name for name in contents if (folder / name).exists())
    if existing:
        return fail(
            f"{folder.absolute()} has {' and '.join(existing)} already, which stays as it is. Name another folder: "
            "azureml-strategy init my_project"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            with open(folder / name, "xb") as file:  # fails if the file has appeared meanwhile
                file.write(content)
    except OSError as error:
        return fail(f"{folder.absolute()} cannot be written: {error}. Name another folder.")
    print(f"{folder}: {', '.join(sorted(contents))}. Next, as README.md there says:")
    if folder.resolve() != Path.cwd():
        print(f"  cd {shlex.quote(str(folder))}")
    print("  python train.py\n  azureml-strategy emulate --nodes 2 -- python train.py")
    print("  azureml-strategy train recipe.yaml")
    return None
