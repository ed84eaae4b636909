"""Make a module again from a consolidated checkpoint, without its training and without code from the file.

The file names classes, and only classes of modules and data classes that this process can import are called. It holds
no code, and no name in it can call a function.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from azureml_strategy.checkpoint.allowed_types import KINDS, MAPPINGS, PLAIN, REFERENCES, SEQUENCES, Names, look_up
from azureml_strategy.checkpoint.formats import CheckpointFormatError
from azureml_strategy.checkpoint.module_record import CLASS, CONFIG, MODULE
from azureml_strategy.checkpoint.serialization import from_plain, hyperparameters
from azureml_strategy.cluster.redaction import REDACTED

_SHOWN = 3
# Keys of Hydra's. The last two change nothing where a configuration holds plain values.
_IGNORED = ("_target_", "_convert_", "_recursive_")
# Types of a module's arguments: values, and containers of more of these.
_VALUES = PLAIN | KINDS.keys() - {defaultdict, deque, SimpleNamespace} | {int}
_CONTAINERS = (*SEQUENCES.values(), *MAPPINGS.values(), AttributeDict, np.ndarray)
# Entries that no hook of a module reads. Only parts of the hyperparameters are passed to anything.
_OF_LIGHTNING = ("state_dict", "hyper_parameters", "hparams_type")


@contextmanager
def modules_of(folder: Path | None) -> Iterator[None]:
    """Let Python import the user's modules in a folder, which is the last on its path inside the context."""
    added = [str(folder)] if folder is not None and str(folder) not in sys.path else []
    sys.path.extend(added)
    try:
        yield
    finally:
        sys.path[:] = [each for each in sys.path if each not in added]  # folders that other threads have added stay


def make_module(content: dict[str, Any]) -> LightningModule:
    """Make the module of a checkpoint and load its weights, on the CPU and in evaluation mode.

    The content is what `consolidate` writes: `state_dict`, `hyper_parameters` and the entry `MODULE`.

    Raises:
        CheckpointFormatError: the content does not tell enough, or the weights do not fit the module.
    """
    record = content.get(MODULE)
    if record is None:
        raise CheckpointFormatError(
            "The file does not tell the class of its module: it is of an older version, or a strategy of others wrote "
            "it. Consolidate or register the checkpoint again with --module-class MODULE.CLASS."
        )
    kind = _class(str(record[CLASS]), "The module") if CLASS in record and CONFIG not in record else None
    # Only the module of the class, and what that imports, has been imported. No further one is imported for a value.
    # Of the names in the file, `_check` accepts only functions of torch.nn and classes of modules and optimizers.
    content = from_plain(content, Names(trusted=True, imports=False))
    if kind is not None:
        module = _construct(kind, _hyperparameters(kind, content), "model")
    elif CONFIG in content[MODULE]:
        module = _instantiate(content[MODULE][CONFIG], "model")
    else:
        raise CheckpointFormatError("The file tells neither the class nor the configuration of its module.")
    if not isinstance(module, LightningModule):
        raise CheckpointFormatError(f"The file names {type(module).__name__}, which is no LightningModule.")
    _prepare(module, content)
    _load(module, content["state_dict"])
    return module.eval()


def _instantiate(node: Any, place: str) -> Any:
    """Make what a node of a configuration names, and everything inside it."""
    if isinstance(node, list):
        return [_instantiate(each, f"{place}[{number}]") for number, each in enumerate(node)]
    if isinstance(node, str) and "${" in node:
        raise CheckpointFormatError(
            f"{place} was {node} in the training, which depends on the machine, so that the file does not tell it. "
            "Give a value in the recipe, and train again."
        )
    if isinstance(node, str) and REDACTED in node:
        raise CheckpointFormatError(
            f"{place} looked like a secret in the training, so that the file does not tell it. Make a subclass whose "
            "__init__ needs no arguments, and name it by --module-class MODULE.CLASS."
        )
    if not isinstance(node, dict):
        return node
    arguments = {name: _instantiate(each, f"{place}.{name}") for name, each in node.items() if name not in _IGNORED}
    return _construct(_class(node["_target_"], place), arguments, place) if "_target_" in node else arguments


def _class(path: str, place: str) -> type:
    """Import the class of a dotted path. Anything else that a name may stand for is refused."""
    module, _, name = path.rpartition(".")
    # The mere import of some of Python's modules has an effect.
    if module.partition(".")[0] in sys.stdlib_module_names and module not in sys.modules:
        raise CheckpointFormatError(f"{place} is {path}, of Python's own library, which has no class of a module.")
    try:
        found = look_up(module, name)
    except ValueError as error:
        raise CheckpointFormatError(f"{place} is {path}, which cannot be imported here. {_advice(path)}") from error
    if not isinstance(found, type) or not (issubclass(found, nn.Module) or dataclasses.is_dataclass(found)):
        raise CheckpointFormatError(
            f"{place} is {path}, which is no class of a module and no data class; nothing else is called on the word "
            "of a file. Make it inside of a LightningModule of your own, and train that."
        )
    return found


def _advice(path: str) -> str:
    if "<locals>" in path:
        return "It is defined inside of a function: move the class to the top level of a file, and train again."
    if path.startswith("__main__."):
        return "It was defined in a notebook: write the class to a file, and name it by --module-class FILE.CLASS."
    return f"Give the folder that holds {path.split('.')[0]}.py by --code FOLDER, or install its package."


def _hyperparameters(kind: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """The saved hyperparameters that the class takes, as `load_from_checkpoint` passes them on."""
    given = hyperparameters(content)
    parameters = inspect.signature(kind).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return given
    needed = [each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_POSITIONAL]
    missing = [name for name in needed if name not in given]
    if missing:
        raise CheckpointFormatError(
            f"{kind.__name__} needs {', '.join(missing)}, which the file does not tell. Call "
            "self.save_hyperparameters() in its __init__ without leaving that out, or train by a recipe; or make a "
            "subclass whose __init__ needs no arguments, and name it by --module-class MODULE.CLASS."
        )
    return {each.name: given[each.name] for each in parameters if each.name in given}


def _construct(kind: type, arguments: dict[str, Any], place: str) -> Any:
    for name, value in arguments.items():
        _check(value, f"{place}.{name}")
    try:
        return kind(**arguments)
    except Exception as error:  # a class of the user's may raise anything
        raise CheckpointFormatError(
            f"{place} cannot be made: {kind.__name__} says {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def _check(value: Any, place: str) -> None:
    """Refuse functions and objects anywhere in an argument: a module may call them, or methods of theirs."""
    for part in _parts(value):
        _check(part, place)
    if not (_is_value(value) or type(value) in _CONTAINERS or dataclasses.is_dataclass(value) or _is_config(value)):
        raise CheckpointFormatError(
            f"{place} holds {value!r:.100}. Only values are given to a module on the word of a file, no functions and "
            "no other objects. Make a subclass whose __init__ needs no arguments, and name it by --module-class "
            "MODULE.CLASS."
        )


def _is_value(value: Any) -> bool:
    if isinstance(value, type):
        return issubclass(value, (nn.Module, torch.optim.Optimizer))
    if isinstance(value, REFERENCES):
        return getattr(value, "__module__", None) in ("torch.nn.functional", "torch._C._nn")
    return type(value) in _VALUES or isinstance(value, (nn.Module, np.generic, Enum))


def _is_config(value: Any) -> bool:
    return type(value).__module__ in ("omegaconf.dictconfig", "omegaconf.listconfig")


def _parts(value: Any) -> Iterable[Any]:
    """What a container holds."""
    if _is_config(value):
        from omegaconf import OmegaConf

        return [OmegaConf.to_container(value)]
    if isinstance(value, np.ndarray):
        return value.flat if value.dtype.hasobject else ()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [getattr(value, each.name, None) for each in dataclasses.fields(value)]
        return [*fields, *getattr(value, "__dict__", {}).values()]
    if type(value) not in _CONTAINERS:
        return ()
    return [each for pair in value.items() for each in pair] if isinstance(value, dict) else value


def _prepare(module: LightningModule, content: dict[str, Any]) -> None:
    """Call what Lightning calls before it loads weights."""
    for name in content.keys() - set(_OF_LIGHTNING):
        _check(content[name], name)
    try:
        if is_overridden("configure_model", module):
            module.configure_model()
        module.on_load_checkpoint(content)
    except Exception as error:  # hooks of the user's may raise anything
        raise CheckpointFormatError(
            f"{type(module).__name__} cannot be prepared for its weights outside of a training: its configure_model or "
            f"on_load_checkpoint says {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def _load(module: LightningModule, weights: Mapping[str, Any]) -> None:
    own = module.state_dict()
    missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or unknown:
        what = f"lacks {_listed(missing)}" if missing else f"has {_listed(unknown)}, which the class does not have"
        raise CheckpointFormatError(
            f"The weights do not fit {type(module).__name__}: the file {what}. Name the class that was trained, in the "
            "version that was trained."
        )
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:  # its later lines name the tensors
        reason = " ".join(str(error).splitlines()[1].split()) if "\n" in str(error) else str(error)
        raise CheckpointFormatError(f"The weights do not fit {type(module).__name__}: {reason}") from error


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
