"""Warns of keys of a composed configuration that are allowed, and that probably nothing reads."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from azureml_strategy.training.checks import target_nodes
from azureml_strategy.training.targets import HYDRA_OWN, locate, parameters_of, taken_by

log = logging.getLogger(__name__)

# Names that are nearer than this are one name, misspelt.
_NEAR = 0.8
_REFERENCE = re.compile(r"\bvars\b((?:\.[^\s.,:'\"()\[\]{}]+)*)(\[?)")
_COMPILE = "${compile}"

Path = tuple[str, ...]


@rank_zero_only
def warn_of_unread_keys(config: DictConfig) -> None:
    """Warn of values under `vars` to which nothing refers, and of keywords that are nearly an argument's name.

    `compile` is read by the strategies that refer to it.

    Args:
        config: composed and checked by `check_config`.
    """
    for text in (*_unread_values(config), *_unread_compile(config), *_misspelt_keywords(config)):
        log.warning(text)


def _unread_values(config: DictConfig) -> Iterator[str]:
    content: Any = OmegaConf.to_container(config, resolve=False)
    # The values under `vars` to which texts refer; the path of all of them is empty.
    references = [found for text in _texts(content) if "${" in text for found in _REFERENCE.finditer(text)]
    read = {() if found[2] else tuple(found[1].split(".")[1:]) for found in references}
    if any("${." in text for text in _texts(content.get("vars"))):  # one of them refers to its neighbours
        return
    unread = [path for path in _leaves(content.get("vars"), ()) if not any(path[: len(each)] == each for each in read)]
    if unread:
        names = ", ".join(".".join(("vars", *path)) for path in unread)
        yield f"No key of the recipe refers to {names}: it changes nothing, unless your own code reads it."


def _unread_compile(config: DictConfig) -> Iterator[str]:
    # A reference is the recipe's own default, which another strategy may leave unread.
    if OmegaConf.is_interpolation(config, "compile") or config.get("compile") in (None, False, "off"):
        return
    content: Any = OmegaConf.to_container(config, resolve=False)
    if any(_COMPILE in text for text in _texts(content)):
        return
    says = f"compile={config.compile} is set, and nothing refers to it: it changes nothing."
    if "compile" in config.strategy:
        yield f"{says} This strategy has its own key: write strategy.compile={config.compile}."
    else:
        yield f"{says} {config.strategy.get('_target_')} has no key compile; strategy=ddp has."


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, (dict, list)):
        for each in node.values() if isinstance(node, dict) else node:
            yield from _texts(each)


def _leaves(node: Any, path: Path) -> Iterator[Path]:
    if isinstance(node, dict):
        for name, each in node.items():
            yield from _leaves(each, (*path, str(name)))
    elif node is not None:
        yield path


def _misspelt_keywords(config: DictConfig) -> Iterator[str]:
    """Yield warnings of keys whose target takes any keyword: Hydra refuses none of them, and nothing may read them."""
    for path, node in target_nodes(config):
        if "${" in str(node["_target_"]):
            continue
        target = locate(path, node["_target_"])
        if taken_by(target) is not None:
            continue
        named = _named(target)
        for name in map(str, node):
            near = "" if name in named or name in HYDRA_OWN else _nearest(name, named - node.keys())
            if near:
                yield (
                    f"{path}.{name} is set, and {node['_target_']} takes any keyword but names no {name!r}. Did you "
                    f"mean {path}.{near}?"
                )


def _nearest(name: str, named: set[str]) -> str:
    """Return the argument with nearly this name; none that differs in numbers alone, as beta2 does from beta1."""
    plain = re.sub(r"\d", "", name)
    others = [each for each in sorted(named) if re.sub(r"\d", "", each) != plain]
    return next(iter(get_close_matches(name, others, n=1, cutoff=_NEAR)), "")


def _named(target: Any) -> set[str]:
    """The arguments that a target names, and those that its bases name, to which a class may hand keywords on."""
    functions = [vars(each).get("__init__") for each in inspect.getmro(target)] if inspect.isclass(target) else [target]
    return {
        each.name
        for function in functions
        if inspect.isroutine(function) or function is target
        for each in parameters_of(function) or ()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
