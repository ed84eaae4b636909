"""A recipe in which the user has put a class of his own where a shipped file names another."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf, open_dict

from azureml_strategy.training.targets import HYDRA_OWN, locate, taken_by

log = logging.getLogger(__name__)

_SHIPPED = "azureml-strategy"  # as our search-path plugin calls itself


def drop_keys_of_old_targets(config: DictConfig) -> None:
    """Take out what shipped files give to a `_target_` that the user has replaced, and that the new one does not take.

    A key that the user wrote stays, in his files or on the command line, so that the check of the configuration
    refuses it. Of a class that takes any keyword, what its base classes name counts; a function that does keeps all.

    Args:
        config: composed by Hydra's running application; any other is left as it is. Changed in place.

    Raises:
        RecipeError: there is no such target.
    """
    if not HydraConfig.initialized() or not GlobalHydra.instance().is_initialized():
        return
    own, shipped = _written()
    with open_dict(config):
        for path in sorted(key.removesuffix("._target_") for key in own if key.endswith("._target_")):
            node = OmegaConf.select(config, path, throw_on_missing=False)
            if isinstance(node, DictConfig) and any(key.startswith(f"{path}.") for key in shipped):
                _drop(path, node, own)


def _drop(path: str, node: DictConfig, own: set[str]) -> None:
    taken = _taken(locate(path, str(node._target_)))
    if taken is None:
        return
    written = {key.removeprefix(f"{path}.").split(".")[0] for key in own if key.startswith(f"{path}.")}
    dropped = [name for name in map(str, node) if name not in taken | written | set(HYDRA_OWN)]
    for name in dropped:
        del node[name]
    if dropped:
        _say(f"{path} is {node._target_} now, which takes none of the recipe's own {', '.join(dropped)}: left out.")


def _taken(target: Any) -> set[str] | None:
    """The arguments that a target names; a class that hands any keyword on takes what its base class names, too."""
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
def _say(line: str) -> None:
    log.info(line)


def _written() -> tuple[set[str], set[str]]:
    """Every key that the user's files and overrides give, and every key that ours give."""
    hydra = HydraConfig.get()
    overrides = [*hydra.overrides.task, *hydra.overrides.hydra]
    loader = GlobalHydra.instance().config_loader()
    own: set[str] = set()
    shipped: set[str] = set()
    for default in loader.compute_defaults_list(hydra.job.config_name, overrides, RunMode.RUN).defaults:
        found = _file(f"{default.config_path}.yaml")
        if found is not None:
            provider, file = found
            text = OmegaConf.create(file.read_text(encoding="utf-8"))
            (shipped if provider == _SHIPPED else own).update(
                _keys(OmegaConf.to_container(text), default.package or "")
            )
    for override in OverridesParser.create().parse_overrides(list(hydra.overrides.task)):
        own.update(_keys(override.value(), override.key_or_group))
    return own, shipped


def _file(name: str) -> tuple[str, Traversable] | None:
    """A file of the configuration and who provides it, from the first place of Hydra's search path that has it."""
    for source in HydraConfig.get().runtime.config_sources:
        if source.schema not in ("file", "pkg"):
            continue
        file = (Path(source.path) if source.schema == "file" else files(source.path)).joinpath(name)
        if file.is_file():
            return str(source.provider), file
    return None


def _keys(node: Any, path: str) -> Iterator[str]:
    """The keys of the values in a nest of dictionaries, with dots."""
    if not isinstance(node, dict):
        yield path
        return
    for name, child in node.items():
        yield from _keys(child, f"{path}.{name}" if path else str(name))
