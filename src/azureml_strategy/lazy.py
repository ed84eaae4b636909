"""Imports the modules of public names only when the names are used (PEP 562)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_attributes(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module-level `__getattr__` that imports the module of a name when the name is used.

    Args:
        package: the package's `__name__`.
        modules: the module of each public name.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807 - it becomes the package's
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return __getattr__
