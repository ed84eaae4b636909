"""Runs an action after a module has been imported, without importing the module.

It uses only the standard library: importing a library for this would take longer than this whole package may take.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]


def when_imported(module: str, action: Action) -> Callable[[], None]:
    """Call `action(module)` now if the module is already imported, or else right after its first import.

    Return a function that forgets the action, if the import has not come yet.
    """
    if module in sys.modules:
        action(sys.modules[module])
        return lambda: None
    finder = _OneModule(module, action)
    sys.meta_path.insert(0, finder)
    return finder.forget


class _OneModule:
    """Finds one module through the other finders, and acts after the module's code has run.

    It is a meta path finder by its method and has no base class, because `importlib.abc` takes long to import.
    """

    def __init__(self, module: str, action: Action) -> None:
        self._module = module
        self._action = action
        self._looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module or self._looking:
            return None
        self._looking = True  # the line below asks all finders again; this one must answer None then
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_act(module: ModuleType) -> None:
                run(module)
                self.forget()
                self._action(module)

            spec.loader.exec_module = run_and_act  # type: ignore[method-assign]
        return spec

    def forget(self) -> None:
        """Take no part in further imports."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
