"""The house as ARCHITECTURE.md draws it: three layers, and no circle of imports, also for types and in functions."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PACKAGE = "azureml_strategy"
JOB, RECIPES, DESK = range(3)


def modules() -> dict[str, Path]:
    """Each module of the package with its file. Folders of data that are linked into it have none."""
    files = (file for file in (SOURCE / PACKAGE).rglob("*.py") if file.relative_to(SOURCE).parts[1] != "project")
    return {".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imported(module: str, file: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of the package that a module names in an import, wherever the import stands."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in known:
                    yield name
                elif node.module in known and node.module != module:
                    yield node.module


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    known = modules()
    return {module: set(imported(module, file, known)) for module, file in known.items()}


def contract(name: str) -> list[set[str]]:
    """The layers of one of import-linter's contracts, from the top: the rooms in each."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["name"] == name)
    return [set(layer.replace("|", ":").replace(" ", "").split(":")) for layer in layers]


def layer_of(module: str) -> int:
    """The layer of a module. What stands beside the rooms belongs to the job, as every process imports it."""
    room = ".".join(module.split(".")[:2])
    layers = contract("Layers: job, recipes, desk")[::-1]
    return next((number for number, rooms in enumerate(layers) if room in rooms), JOB)


def test_there_is_no_circle(imports: dict[str, set[str]]) -> None:
    # A package's own `__init__.py` hands on names; what it hands on may import the package's other modules.
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_a_circle_is_found() -> None:
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()


def test_no_layer_imports_from_one_above(imports: dict[str, set[str]]) -> None:
    wrong = [f"{a} -> {b}" for a in imports for b in imports[a] if layer_of(a) < layer_of(b)]
    assert wrong == []


def test_every_room_is_in_one_layer() -> None:
    folders = (file.parent for file in (SOURCE / PACKAGE).glob("*/__init__.py"))
    rooms = {f"{PACKAGE}.{folder.name}" for folder in folders if not folder.is_symlink()}
    layers = contract("Layers: job, recipes, desk")
    assert sorted(room for layer in layers for room in layer) == sorted(rooms)
    assert set().union(*contract("Directions between rooms")) == rooms


def test_the_picture_shows_the_layers() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for name, rooms in zip(("desk", "recipes", "job"), contract("Layers: job, recipes, desk"), strict=True):
        picture = text.split(f"│ {name}", 1)[1].split("└", 1)[0]
        assert all(room.removeprefix(f"{PACKAGE}.") in picture for room in rooms), name
