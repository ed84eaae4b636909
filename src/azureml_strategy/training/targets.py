"""What a `_target_` names: finding it, in the user's own modules too, and what it takes."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import MISSING

from azureml_strategy.training.errors import RecipeError, near_matches

HYDRA_OWN = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
"""Keys beside a `_target_` that Hydra reads itself."""


@contextmanager
def own_modules(folder: str | None) -> Iterator[None]:
    """Let recipes name the user's own modules: beside the recipe, then in the current folder.

    Both come at the end of the path. At its front, where a script's own folder stands, a file `random.py` or `data.py`
    would take the place of Python's or of an installed package in every process of the run. Processes that
    multiprocessing starts get this path from it; ranks get it by running the same command.

    Args:
        folder: where the recipe lies; None for a shipped one.
    """
    added = [each for each in dict.fromkeys((folder, os.getcwd())) if each is not None and each not in sys.path]
    sys.path.extend(added)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for each in added:
            sys.path.remove(each)


def locate(place: str, target: str) -> Any:
    """The class or function that a `_target_` names.

    Args:
        place: of the key, for the error message, as `model.network`.
        target: a dotted path, as `torch.optim.SGD`.

    Raises:
        RecipeError: there is no such thing, or its module cannot be imported.
    """
    refuse_missing(place, target)
    key = f"{place}._target_ is {target!r}"
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        raise RecipeError(f"{key}, which is no dotted path. Write MODULE.NAME, as torch.optim.SGD.")
    module, names = _import(key, target.split("."))
    found: Any = module
    for name in names:
        if not hasattr(found, name):
            raise RecipeError(_absent(key, found, name))
        found = getattr(found, name)
    if not callable(found):
        raise RecipeError(f"{key}, a {type(found).__name__}, but must name a class or a function.")
    return found


def refuse_missing(place: str, target: str) -> None:
    """Refuse a `_target_` without a value, as `base_run` has for the model.

    Raises:
        RecipeError: it is `???`.
    """
    if target == MISSING:
        raise RecipeError(
            f"{place}._target_ has no value: the recipe leaves it to you. Type {place}._target_=MODULE.CLASS, or write "
            f"{place}: {{_target_: MODULE.CLASS, ...}} in a recipe of your own."
        )


def taken_by(target: Any) -> set[str] | None:
    """The names of the arguments that a class or function takes; None where it takes any."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # some that are written in C do not say
        return None
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return None
    return set(parameters)


def lies_in(folder: str, target: str) -> bool:
    """Whether a dotted path names a module of this folder, and none that is installed; nothing is imported.

    Args:
        folder: the current one, or any other.
        target: a dotted path.
    """
    top = target.split(".")[0]
    own = {Path(folder).absolute() / top / "__init__.py", Path(folder).absolute() / f"{top}.py"}
    if not any(each.is_file() for each in own):
        return False
    found = importlib.util.find_spec(top)
    return found is None or Path(found.origin or "") in own


def _import(key: str, parts: list[str]) -> tuple[ModuleType, list[str]]:
    """The innermost module of a dotted path, and the names that are left."""
    module: ModuleType | None = None
    for place, part in enumerate(parts):
        if module is not None and (hasattr(module, part) or not hasattr(module, "__path__")):
            return module, parts[place:]
        name = ".".join(parts[: place + 1])
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise RecipeError(_broken(key, name, error)) from error
            if module is not None:
                return module, parts[place:]
            raise RecipeError(_no_module(key, name)) from error
        except Exception as error:  # whatever the user's module does
            raise RecipeError(_broken(key, name, error)) from error
    assert module is not None, "a dotted path has a part"
    return module, []


def _no_module(key: str, name: str) -> str:
    known = {path.stem for folder in _own_folders() for path in folder.glob("*.py")}
    known |= {path.parent.name for folder in _own_folders() for path in folder.glob("*/__init__.py")}
    near = f" {near_matches(name, known)}" if known else ""
    return (
        f"{key}. There is no module {name}: it is not installed, and lies neither beside the recipe nor in the current "
        f"folder.{near}"
    )


def _absent(key: str, owner: Any, name: str) -> str:
    if not isinstance(owner, ModuleType):
        return f"{key}, but {getattr(owner, '__qualname__', owner)} has no {name}."
    file = getattr(owner, "__file__", None) or owner.__name__
    near = near_matches(name, (each for each in dir(owner) if not each.startswith("_")))
    return f"{key}, but {file} has no {name}. {_hidden(owner.__name__, file)}{near}".rstrip()


def _hidden(module: str, file: str) -> str:
    """What to do where a module of the user's has the name of another, which Python finds first."""
    top = module.split(".")[0]
    for folder in _own_folders():
        for own in (folder / f"{top}.py", folder / top / "__init__.py"):
            if own.is_file() and not Path(file).is_relative_to(own.parent):
                return f"{own} is hidden by this module of the same name: rename it, to my_{top} say. "
    return ""


def _broken(key: str, name: str, error: Exception) -> str:
    """Why a module cannot be imported, and the innermost line of the user's own code that is at fault."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if any(Path(each.filename).is_relative_to(folder) for folder in _own_folders())]
    if isinstance(error, SyntaxError):
        where = f"{error.filename}, line {error.lineno}"
    else:
        where = f"{own[-1].filename}, line {own[-1].lineno}" if own else f"module {name}"
    install = "" if not isinstance(error, ModuleNotFoundError) else " Install it, or correct the import."
    return f"{key}, but its module cannot be imported. {where}: {type(error).__name__}: {error}.{install}"


def _own_folders() -> list[Path]:
    """The folders of the path that hold neither Python itself nor what is installed."""
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
    folders = [Path(each or os.curdir).absolute() for each in sys.path]
    return [each for each in folders if each.is_dir() and not any(each.is_relative_to(one) for one in installed)]
