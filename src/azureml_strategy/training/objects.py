"""The objects of a recipe: whatever has a `_target_`, made by Hydra."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

from azureml_strategy.training.errors import RecipeError


def make(place: str, node: Any, **settings: Any) -> Any:
    """Make what a node of the configuration names, and everything inside of it.

    Args:
        place: of the node, for the error message.
        node: with a `_target_`, or with such nodes anywhere below; any other value is returned as it is.
        settings: Hydra's, as `_convert_`.

    Raises:
        RecipeError: it cannot be made, and why.
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
    """What `tracking`, `callbacks` and `checkpoint` make, in this order.

    Each of them is one object, or a mapping or a list of them, of mappings and lists again; `null` leaves one out.
    A part of `tracking` that makes a logger is one, whatever its name.

    Raises:
        RecipeError: a part makes something else.
    """
    loggers: list[Logger] = []
    callbacks: list[Callback] = []
    for section in ("tracking", "callbacks", "checkpoint"):
        for place, made in _parts(section, config.get(section)):
            if isinstance(made, Logger) and section == "tracking":
                loggers.append(made)
            elif isinstance(made, Callback):
                callbacks.append(made)
            else:
                raise RecipeError(_neither(place, made))
    return loggers, callbacks


def _parts(place: str, node: Any) -> Iterator[tuple[str, Any]]:
    if node is None:
        return
    if isinstance(node, ListConfig):
        for number, child in enumerate(node):
            yield from _parts(f"{place}[{number}]", child)
    elif isinstance(node, DictConfig) and "_target_" not in node and ("." not in place or _holds_parts(node)):
        for name, child in node.items():
            yield from _parts(f"{place}.{name!s}", child)
    else:
        yield place, make(place, node)


def _holds_parts(node: DictConfig) -> bool:
    return all(child is None or isinstance(child, (DictConfig, ListConfig)) for child in node.values())


def _neither(place: str, made: Any) -> str:
    section = place.split(".")[0].split("[")[0]
    wanted = "logger or callback" if section == "tracking" else "callback"
    move = " A logger belongs under `tracking`." if isinstance(made, Logger) else ""
    return (
        f"{place} makes a {type(made).__name__}, which is no {wanted} of the `lightning` package.{move} Name one: "
        f"{place}: {{_target_: lightning.pytorch.callbacks.EarlyStopping, ...}}, or write null to leave it out."
    )


def _reason(error: InstantiationException) -> str:
    """What the constructor said, and where; Hydra's own words where it called none."""
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
