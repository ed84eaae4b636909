"""Names in the text of the pages are names of the code: metrics, keys, defaults, verbs, arguments, variables."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.utils import get_class
from lightning.pytorch import Trainer

from azureml_strategy import checkpoint, hang_detection, preemption, profiling, strategies, tracking
from azureml_strategy.cli import _parser
from azureml_strategy.hang_detection import HangWatch
from azureml_strategy.preemption import TerminateTogether
from azureml_strategy.strategies import AzureMLLocalSGDStrategy, PipelineStrategy
from azureml_strategy.tracking.timing.summary import _LOGGED

ROOT = Path(__file__).parents[2]
PACKAGE, CONF = ROOT / "src" / "azureml_strategy", ROOT / "conf"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_METRIC = re.compile(r"(?:throughput|step|time|ranks|cost|summary|pipeline|tune)/[a-z][a-z0-9_/]*")
_KEY = re.compile(
    r"(trainer|data|model|strategy|job|cluster|tracking|checkpoint|profile|head_space)((?:\.\w+)+)(?:=\S*)?"
)
_VARIABLE = re.compile(r"AZUREML_STRATEGY_[A-Z_]*[A-Z]")
# Files and attributes that look like keys.
_NO_KEYS = {"profile.request", "profile.answer", "profile.taken", "data.py", "model.module"}
# A verb that a page shows as misspelt, and a word of a message that begins with the name of the command.
_NO_VERBS = {"trian", "works"}


def spoken(page: Path) -> set[str]:
    """What stands between backticks in the text, not in blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    paragraphs = re.split(r"\n\n|\n(?=\|)", text)
    return {" ".join(each.split()) for part in paragraphs for each in re.findall(r"`([^`]+)`", part)}


@cache
def all_spoken() -> frozenset[str]:
    return frozenset().union(*map(spoken, PAGES))


@cache
def strings() -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """Every string of the package, and a pattern for each that is put together with a name of a metric in front."""
    exact, made = set(), []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                exact.add(node.value)
            if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                parts = [re.escape(str(p.value)) if isinstance(p, ast.Constant) else r"\w+" for p in node.values]
                made.append(re.compile("".join(parts)))
    return frozenset(exact), tuple(each for each in made if "/" in each.pattern)


def test_metrics_of_the_pages_are_logged() -> None:
    exact, made = strings()
    named = {each for each in all_spoken() if _METRIC.fullmatch(each)}
    assert len(named) > 25
    assert not [each for each in sorted(named) if each not in exact and not any(p.fullmatch(each) for p in made)]


def test_metrics_that_are_logged_are_explained() -> None:
    logged = {each for each in strings()[0] if re.fullmatch(r"(throughput|cost|tune|pipeline)/[a-z_]*[a-z]", each)}
    logged |= {f"throughput/{name}" for name in _LOGGED}
    assert len(logged) > 12
    assert not logged - all_spoken()


@cache
def keys() -> dict[str, Any]:
    """Every key of the configuration with its default, by its place in a recipe; several choices may have one."""
    found: dict[str, Any] = {}
    for path in CONF.rglob("*.yaml"):
        text = path.read_text()
        group = "" if "@package _global_" in text else ".".join(path.parent.relative_to(CONF).parts)
        found.update(_flat(yaml.safe_load(text) or {}, group))
    return found


def _flat(values: dict[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        path = f"{place}.{key}".removeprefix(".")
        yield path, value
        if key == "_target_":
            yield from ((f"{place}.{name}", default) for name, default in _arguments(str(value)))
        if isinstance(value, dict):
            yield from _flat(value, path)


def _arguments(target: str) -> Iterator[tuple[str, Any]]:
    if target.startswith(("azureml_strategy", "lightning")):
        for each in inspect.signature(get_class(target)).parameters.values():
            yield each.name, each.default


def test_keys_of_the_pages_are_keys_of_the_configuration() -> None:
    named = {each: found for each in all_spoken() - _NO_KEYS if (found := _KEY.fullmatch(each))}
    assert len(named) > 70
    wrong = [each for each, found in named.items() if not _known(found[1], found[2].removeprefix("."))]
    assert not sorted(wrong)


def _known(group: str, path: str) -> bool:
    if group == "trainer" and (hasattr(Trainer, path) or path in ("callbacks", "should_stop")):  # set by its __init__
        return True
    path = re.sub(r"^inputs\.\w+", "inputs.images", path)  # which the reader names
    pattern = re.sub(r"\b[A-Z]+\b", r"\\w+", re.escape(f"{group}.{path}"))
    return any(re.fullmatch(pattern, each) for each in keys())


def test_verbs_of_the_pages_are_verbs() -> None:
    verbs = next(each.choices for each in _parser()._actions if isinstance(each.choices, dict))
    named = {each.split()[1] for each in all_spoken() if re.match(r"azureml-strategy [a-z]+", each)}
    assert len(named) > 8
    assert named - set(verbs) == _NO_VERBS


def test_arguments_of_the_pages_are_arguments() -> None:
    modules = (checkpoint, hang_detection, preemption, profiling, strategies, tracking)
    ours = {name: getattr(module, name) for module in modules for name in module.__all__}
    checked = 0
    for text in sorted(each for each in all_spoken() if re.fullmatch(r"\w+\(.*\)", each)):
        call = _call(text)
        if call is None or ast.unparse(call.func) not in ours:
            continue
        for keyword in call.keywords:
            checked += 1
            assert keyword.arg in _accepted(ours[ast.unparse(call.func)]), text
    assert checked > 8


def _call(text: str) -> ast.Call | None:
    try:
        found = ast.parse(text, mode="eval").body
    except SyntaxError:  # an ellipsis in the place of arguments
        return None
    return found if isinstance(found, ast.Call) else None


def _accepted(kind: type) -> set[str]:
    """Arguments of a class, and of those that it hands its keywords on to."""
    return {name for each in kind.__mro__[:-1] for name in inspect.signature(each).parameters}


def _table(page: str, header: str) -> list[list[str]]:
    """Cells of the rows below a table's header."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    found = re.search(rf"^{re.escape(header)}.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)
    assert found, f"{page}.md has no table {header}"
    return [[cell.strip() for cell in row.strip().strip("|").split(" | ")] for row in found[1].splitlines()]


@pytest.mark.parametrize(
    ("page", "kind"),
    [("hangs", HangWatch), ("low_priority", TerminateTogether)],
)
def test_defaults_of_arguments_are_those_of_the_code(page: str, kind: type) -> None:
    defaults = {each.name: each.default for each in inspect.signature(kind).parameters.values()}
    rows = _table(page, "| argument | default |")
    compared = 0
    for name, told, *_ in rows:
        assert name.strip("`") in defaults
        if re.fullmatch(r"[\d.]+|true|false", told):
            compared += 1
            assert yaml.safe_load(told) == defaults[name.strip("`")], name
    assert compared >= 2


def test_the_pipelines_defaults_are_those_of_the_code() -> None:
    defaults = {each.name: each.default for each in inspect.signature(PipelineStrategy).parameters.values()}
    told = [cells[0].strip("`").partition("=") for cells in _table("pipeline", "| argument | meaning |")]
    assert [(name, yaml.safe_load(value)) for name, _, value in told] == [(name, defaults[name]) for name, _, _ in told]


def test_arguments_of_local_sgd_are_arguments() -> None:
    names = set(inspect.signature(AzureMLLocalSGDStrategy).parameters)
    told = {
        name for cells in _table("slow_network", "| argument | meaning |") for name in re.findall(r"`(\w+)`", cells[0])
    }
    assert told
    assert told <= names


def test_defaults_of_keys_are_those_of_the_configuration() -> None:
    compared = 0
    for name, told, *_ in _table("checkpoints", "| `checkpoint.` | default |"):
        if re.fullmatch(r"[\d.]+|true|false|none", told):
            compared += 1
            assert (None if told == "none" else yaml.safe_load(told)) == keys()[f"checkpoint.{name.strip('`')}"], name
    assert compared >= 5


def test_the_variables_of_the_pages_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    prefix = "AZUREML_STRATEGY_PRICE"
    ours = {each for each in _VARIABLE.findall(source) if not each.startswith(prefix)}
    told = {each for path in PAGES for each in _VARIABLE.findall(path.read_text()) if not each.startswith(prefix)}
    assert ours == {each for each in _VARIABLE.findall(page) if not each.startswith(prefix)}
    assert told <= ours
    named = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", page))
    assert not sorted(each for each in named if f'"{each}"' not in source and not each.startswith(prefix))
