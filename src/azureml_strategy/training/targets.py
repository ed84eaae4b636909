"""Checks and builds the classes that a recipe names with `_target_`."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from types import ModuleType
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from azureml_strategy.command_line import as_typed
from azureml_strategy.training.recipes import RecipeError, near_matches

HYDRA_OWN = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
"""Keys beside a `_target_` that Hydra itself reads."""
_CALLBACKS = ("tracking", "callbacks", "checkpoint", "profile", "head_space")

log = logging.getLogger(__name__)
_SHIPPED = "azureml-strategy"  # the name that our search-path plugin gives itself


@contextmanager
def own_modules(folder: str | None) -> Iterator[None]:
    """Let recipes name the user's own modules, beside the recipe or in the current folder.

    Both folders go to the end of the path. At its front, where Python puts the folder of a script, a file `random.py`
    or `data.py` would replace Python's module or that of an installed package in every process of the run. Processes
    that multiprocessing starts inherit this path; ranks get it because they run the same command. `folder` is that of
    the recipe; None for a shipped one.
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
        place: path of the key for the error message, such as `model.network`.
        target: a dotted path, such as `torch.optim.SGD`.

    Raises:
        RecipeError: the target does not exist, or its module cannot be imported.
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
    """Refuse a `_target_` without a value, which is what `base_run` has for the model.

    Raises:
        RecipeError: the target is `???`.
    """
    if target == MISSING:
        raise RecipeError(
            f"{place}._target_ has no value: the recipe leaves it to you. Type {place}._target_=MODULE.CLASS, or write "
            f"{place}: {{_target_: MODULE.CLASS, ...}} in a recipe of your own."
        )


def parameters_of(target: Any) -> list[inspect.Parameter] | None:
    """The parameters of a class or function; None if it has no signature, as some functions written in C."""
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return None


def taken_by(target: Any) -> set[str] | None:
    """The names of the arguments that a class or function takes; None if it takes any, or has no signature."""
    parameters = parameters_of(target)
    if parameters is None or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    return {each.name for each in parameters}


def lies_in(folder: str, target: str) -> bool:
    """Whether a dotted path names a module of this folder, and not an installed one. Nothing is imported."""
    top = target.split(".")[0]
    own = {Path(folder).absolute() / top / "__init__.py", Path(folder).absolute() / f"{top}.py"}
    if not any(each.is_file() for each in own):
        return False
    found = importlib.util.find_spec(top)
    return found is None or Path(found.origin or "") in own


def _import(key: str, parts: list[str]) -> tuple[ModuleType, list[str]]:
    """Import the innermost module of a dotted path, and return it with the remaining names."""
    module: ModuleType | None = None
    for place, part in enumerate(parts):
        # A module that is an attribute is imported all the same: modules within it may not be.
        here = module is not None and hasattr(module, part) and not isinstance(getattr(module, part), ModuleType)
        if module is not None and (here or not hasattr(module, "__path__")):
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
        except Exception as error:  # the user's module may raise anything
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
    """A hint for a module of the user that another one hides, because Python finds the other one first."""
    top = module.split(".")[0]
    for folder in _own_folders():
        for own in (folder / f"{top}.py", folder / top / "__init__.py"):
            if own.is_file() and not Path(file).is_relative_to(own.parent):
                return f"{own} is hidden by this module of the same name: rename it, to my_{top} say. "
    return ""


def _broken(key: str, name: str, error: Exception) -> str:
    """Why a module cannot be imported, with the innermost line of the user's own code in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if any(Path(each.filename).is_relative_to(folder) for folder in _own_folders())]
    if isinstance(error, SyntaxError):
        where = f"{error.filename}, line {error.lineno}"
    else:
        where = f"{own[-1].filename}, line {own[-1].lineno}" if own else f"module {name}"
    install = "" if not isinstance(error, ModuleNotFoundError) else " Install it, or correct the import."
    return f"{key}, but its module cannot be imported. {where}: {type(error).__name__}: {error}.{install}"


def _own_folders() -> list[Path]:
    """The folders of the path that hold neither Python itself nor installed packages."""
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
    folders = [Path(each or os.curdir).absolute() for each in sys.path]
    return [each for each in folders if each.is_dir() and not any(each.is_relative_to(one) for one in installed)]


@dataclass(frozen=True)
class Written:
    """Who set which keys of a composed configuration. Keys are in dotted form.

    Attributes:
        own: set by the user's files and overrides.
        recipes: set by our recipes.
        groups: set by our files of groups, such as `strategy/ddp`.
    """

    own: set[str]
    recipes: set[str]
    groups: set[str]


def drop_keys_of_old_targets(config: DictConfig) -> None:
    """Remove keys that shipped files set for a class that was replaced, if the new class does not take them.

    The user has replaced a `_target_`, or chosen another file of a group for which the recipe sets keys, such as
    `strategy=ddp` in place of `diloco`. A key that the user wrote, in a file or on the command line, stays, so that the
    check of the configuration refuses it. A class that takes any keyword is judged by the arguments that its base
    classes name. A function that takes any keyword keeps all keys.

    The configuration is changed in place if Hydra's running application has composed it. Any other is left as it is.

    Raises:
        RecipeError: there is no such target.
    """
    written = written_keys()
    if written is None:
        return
    replaced = {key.removesuffix("._target_") for key in written.own if key.endswith("._target_")}
    chosen = {key.split(".")[0] for key in written.recipes} - replaced
    with open_dict(config):
        for path in sorted(replaced):
            _drop(config, path, _below(path, written.recipes | written.groups) - _below(path, written.own))
        for section in sorted(chosen):
            _drop(config, section, _below(section, written.recipes) - _below(section, written.groups | written.own))


def _below(path: str, keys: set[str]) -> set[str]:
    """The names right below a key."""
    return {key.removeprefix(f"{path}.").split(".")[0] for key in keys if key.startswith(f"{path}.")}


def _drop(config: DictConfig, path: str, names: set[str]) -> None:
    node = OmegaConf.select(config, path, throw_on_missing=False)
    if not names or not isinstance(node, DictConfig) or node.get("_target_") is None:
        return
    taken = _taken(locate(path, str(node._target_)))
    dropped = [] if taken is None else [name for name in map(str, node) if name in names - taken - set(HYDRA_OWN)]
    for name in dropped:
        del node[name]
    if dropped:
        _log_on_rank_0(
            f"{path} is {node._target_} now, which takes none of the recipe's own {', '.join(dropped)}: left out."
        )


def _taken(target: Any) -> set[str] | None:
    """Return the arguments of a target. A class that passes any keyword on also takes those that its bases name."""
    taken = taken_by(target)
    if taken is not None or not inspect.isclass(target):
        return taken
    named: set[str] = set()
    for each in inspect.getmro(target):
        if "__init__" not in vars(each):
            continue
        parameters = inspect.signature(each.__init__).parameters  # type: ignore[misc]
        named |= set(parameters)
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
            break
    return named


@rank_zero_only
def _log_on_rank_0(line: str) -> None:
    log.info(line)


# Hydra's job and the result of `written_keys` for it: to find that takes as long as composing the recipe.
_last: tuple[object, Written] | None = None


def written_keys() -> Written | None:
    """Return which keys the user has set, and which we have; None if no application of Hydra's is running."""
    global _last
    if not HydraConfig.initialized() or not GlobalHydra.instance().is_initialized():
        return None
    job = HydraConfig.instance().cfg
    if _last is None or _last[0] is not job:
        _last = (job, _written())
    return _last[1]


def _written() -> Written:
    hydra = HydraConfig.get()
    overrides = [*as_typed(hydra.overrides.task), *as_typed(hydra.overrides.hydra)]
    loader = GlobalHydra.instance().config_loader()
    written = Written(set(), set(), set())
    for default in loader.compute_defaults_list(hydra.job.config_name, overrides, RunMode.RUN).defaults:
        found = _file(f"{default.config_path}.yaml")
        if found is not None:
            provider, file = found
            text = OmegaConf.create(file.read_text(encoding="utf-8"))
            keys = _keys(OmegaConf.to_container(text), default.package or "")
            ours = written.groups if default.package else written.recipes
            (ours if provider == _SHIPPED else written.own).update(keys)
    for override in OverridesParser.create().parse_overrides(as_typed(hydra.overrides.task)):
        written.own.update(_keys(override.value(), override.key_or_group))
    return written


def _file(name: str) -> tuple[str, Traversable] | None:
    """A configuration file and its provider, from the first place on Hydra's search path that has it."""
    for source in HydraConfig.get().runtime.config_sources:
        if source.schema not in ("file", "pkg"):
            continue
        file = (Path(source.path) if source.schema == "file" else files(source.path)).joinpath(name)
        if file.is_file():
            return str(source.provider), file
    return None


def _keys(node: Any, path: str) -> Iterator[str]:
    """The keys of the values in nested dictionaries, in dotted form."""
    if not isinstance(node, dict):
        yield path
        return
    for name, child in node.items():
        yield from _keys(child, f"{path}.{name}" if path else str(name))


def make(place: str, node: Any, **settings: Any) -> Any:
    """Build what a node of the configuration names, and everything inside it.

    Args:
        place: path of the node, for the error message.
        node: has a `_target_`, or such nodes anywhere below. Any other value is returned as it is.
        settings: Hydra's, such as `_convert_`.

    Raises:
        RecipeError: it cannot be built; the message says why.
    """
    if not isinstance(node, (DictConfig, ListConfig)):
        return node
    try:
        return instantiate(node, **settings)
    except InstantiationException as error:
        if "HYDRA_FULL_ERROR" in os.environ:
            raise
        raise RecipeError(f"{place} cannot be made. {_reason(error)}") from error
    except OmegaConfBaseException as error:
        raise RecipeError(f"{place} cannot be made: {str(error).splitlines()[0]}") from error


def loggers_and_callbacks(config: DictConfig) -> tuple[list[Logger], list[Callback]]:
    """Build the loggers and callbacks of a recipe's sections, in the order of `_CALLBACKS`.

    Each section is one object, or a mapping or list of objects, mappings and lists. `null` leaves one out, and so does
    `_target_: null`, whatever keys are beside it. Any logger under `tracking` is used, whatever its key. A run that
    measures its head-space writes no checkpoints.

    Raises:
        RecipeError: a section makes something else.
    """
    loggers: list[Logger] = []
    callbacks: list[Callback] = []
    measures = OmegaConf.select(config, "head_space.steps") is not None
    for section in _CALLBACKS:
        if section == "checkpoint" and measures:
            continue
        for place, made in _parts(section, config.get(section)):
            if isinstance(made, Logger) and section == "tracking":
                loggers.append(made)
            elif isinstance(made, Callback):
                callbacks.append(made)
            else:
                raise RecipeError(_neither_message(place, made))
    return loggers, callbacks


def _parts(place: str, node: Any) -> Iterator[tuple[str, Any]]:
    if node is None:
        return
    if isinstance(node, DictConfig) and "_target_" in node and node._target_ is None:
        written = written_keys()
        unread = sorted(_below(place, written.own) - set(HYDRA_OWN)) if written is not None else []
        if unread:
            _log_on_rank_0(
                f"{place}._target_ is null, which makes nothing, so that your {', '.join(unread)} there is not read."
            )
        return
    if isinstance(node, ListConfig):
        for number, child in enumerate(node):
            yield from _parts(f"{place}[{number}]", child)
        return
    if isinstance(node, DictConfig) and "_target_" not in node:
        containers = all(child is None or isinstance(child, (DictConfig, ListConfig)) for child in node.values())
        if "." not in place or containers:
            for name, child in node.items():
                yield from _parts(f"{place}.{name!s}", child)
            return
    yield place, make(place, node)


def _neither_message(place: str, made: Any) -> str:
    section = place.split(".")[0].split("[")[0]
    wanted = "logger or callback" if section == "tracking" else "callback"
    move = " A logger belongs under `tracking`." if isinstance(made, Logger) else ""
    if section not in ("tracking", "callbacks") and place != section:
        return (
            f"{place} is {made!r}, but {section} has no _target_ that takes it. Name the class whose keys these are: "
            f"{section}._target_=MODULE.CLASS; or leave the section out: {section}._target_=null."
        )
    return (
        f"{place} makes a {type(made).__name__}, which is no {wanted} of the `lightning` package.{move} Name one: "
        f"{place}: {{_target_: lightning.pytorch.callbacks.EarlyStopping, ...}}, or write null to leave it out."
    )


def _reason(error: InstantiationException) -> str:
    """Return the constructor's error, and where it was raised; Hydra's message if no constructor was called."""
    cause: BaseException = error
    while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, InstantiationException):
        return " ".join(str(cause).split())
    hydras = Path(hydra.__file__).parent
    frames = [each for each in traceback.extract_tb(cause.__traceback__) if hydras not in Path(each.filename).parents]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    more = " Set HYDRA_FULL_ERROR=1 for the whole traceback."
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}{where}{more}"
