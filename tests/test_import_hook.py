from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from azureml_strategy.import_hook import when_imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package `hooked` with a module `inner`, which nothing has imported; what tests leave behind is removed."""
    (tmp_path / "hooked").mkdir()
    (tmp_path / "hooked" / "__init__.py").write_text("")
    (tmp_path / "hooked" / "inner.py").write_text("value = 1\n")
    (tmp_path / "hooked" / "broken.py").write_text("raise RuntimeError('in the module')\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield "hooked"
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "hooked"]:
        del sys.modules[name]


def test_the_action_runs_once_after_the_modules_code(package: str) -> None:
    seen: list[int] = []
    when_imported("hooked.inner", lambda module: seen.append(module.value))
    assert seen == []
    importlib.import_module("hooked.inner")
    importlib.import_module("hooked.inner")
    assert seen == [1]


def test_of_a_module_that_was_imported_before_it_runs_now(package: str) -> None:
    inner = importlib.import_module("hooked.inner")
    seen: list[ModuleType] = []
    when_imported("hooked.inner", seen.append)
    assert seen == [inner]


def test_other_modules_do_not_trigger_it(package: str) -> None:
    seen: list[ModuleType] = []
    when_imported("hooked.inner", seen.append)
    importlib.import_module("hooked")
    assert seen == []


def test_two_actions_both_run(package: str) -> None:
    seen: list[str] = []
    when_imported("hooked.inner", lambda module: seen.append("first"))
    when_imported("hooked.inner", lambda module: seen.append("second"))
    importlib.import_module("hooked.inner")
    assert sorted(seen) == ["first", "second"]


def test_it_leaves_the_import_system_as_it_was(package: str) -> None:
    before = list(sys.meta_path)
    when_imported("hooked.inner", lambda module: None)
    inner = importlib.import_module("hooked.inner")
    assert sys.meta_path == before
    assert importlib.reload(inner) is inner


def test_an_action_that_is_forgotten_does_not_run(package: str) -> None:
    before = list(sys.meta_path)
    forget = when_imported("hooked.inner", lambda module: pytest.fail("it was forgotten"))
    forget()
    assert sys.meta_path == before
    importlib.import_module("hooked.inner")
    forget()
    assert sys.meta_path == before


def test_a_module_that_does_not_exist_is_still_an_import_error(package: str) -> None:
    when_imported("hooked.absent", lambda module: pytest.fail("there is no such module"))
    with pytest.raises(ModuleNotFoundError, match=r"hooked\.absent"):
        importlib.import_module("hooked.absent")


def test_a_module_that_fails_keeps_its_own_error(package: str) -> None:
    when_imported("hooked.broken", lambda module: pytest.fail("the module was never there"))
    with pytest.raises(RuntimeError, match="in the module"):
        importlib.import_module("hooked.broken")
