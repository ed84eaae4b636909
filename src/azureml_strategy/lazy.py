"""Imports the modules of public names only when the names are used (PEP 562), and names the extra that brings one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# The extra of pyproject.toml that brings a library.
_EXTRAS = {
    "azure": "azure",
    "deepspeed": "deepspeed",
    "hydra": "recipes",
    "jinja2": "report",
    "jsonargparse": "cli",
    "matplotlib": "report",
    "obstore": "data",
    "omegaconf": "recipes",
    "onnx": "export",
    "onnxscript": "export",
    "PIL": "data",
    "pyarrow": "data",
    "safetensors": "export",
    "simplejpeg": "data",
    "sklearn": "recipes",
    "tensorboard": "tensorboard",
    "tokenizers": "text",
    "wandb": "wandb",
}


def lazy_attributes(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module-level `__getattr__` that imports the module of a name when the name is used.

    Its imports raise a `ModuleNotFoundError` that says what to type if an extra is missing. The package also gets a
    `__dir__` with these names, for completion in notebooks and shells, which imports nothing.

    Args:
        package: the package's `__name__`.
        modules: the module of each public name.
    """
    namespace = vars(sys.modules[package])
    namespace["__dir__"] = lambda: sorted({*namespace, *modules})

    def __getattr__(name: str) -> Any:  # noqa: N807 - it becomes the package's
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = import_module(modules[name])
        except ModuleNotFoundError as error:
            advice = missing_extra(error)
            if advice is None:
                raise
            raise ModuleNotFoundError(f"{name} cannot be imported: {advice}", name=error.name) from error
        return getattr(module, name)

    return __getattr__


def require_library(name: str) -> None:
    """Check that a library of an extra is installed, before work begins that would be lost without it.

    Raises:
        ModuleNotFoundError: it is not; the command line says which extra brings it.
    """
    if find_spec(name) is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def install_line(extra: str) -> str:
    """What to type for an extra of pyproject.toml. Until there is a release on PyPI, one installs from a clone."""
    return f"pip install -c constraints.txt '.[{extra}]' in a clone of azureml-strategy"


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Say what to type for a library that was not found; None if no extra brings it."""
    library = (error.name or "").partition(".")[0]
    if library not in _EXTRAS:
        return None
    return f"{library} is not installed here. Type: {install_line(_EXTRAS[library])}"
