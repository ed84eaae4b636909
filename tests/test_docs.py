"""Commands that the pages show are commands that there are."""

from __future__ import annotations

import importlib
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from tests.jobs.rendering import cache

from azureml_strategy.cli import _parser, main
from azureml_strategy.command_line import is_override
from azureml_strategy.training.checks import check_overrides
from azureml_strategy.training.recipes import shipped_recipes
from azureml_strategy.training.resolvers import register_resolvers

__all__ = ["cache"]  # a fixture

ROOT = Path(__file__).parents[1]
FIGURES = [ROOT / "benchmarks" / "README.md", ROOT / "docs" / "gpu.md"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page: Path) -> list[list[str]]:
    """The words of each `azureml-strategy` command in the page's blocks of shell lines."""
    blocks = re.findall(r"^```(?:bash|console)\n(.*?)^```", page.read_text(), re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [re.search(r"(?:^|\s)azureml-strategy\s(.*)", re.split(r" #| > ", line)[0]) for line in lines]
    return [shlex.split(each[1]) for each in found if each]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_command_line_takes_them(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands(page):
        try:
            _parser().parse_args(words)
        except SystemExit as end:
            if end.code == 0:  # --help
                continue
            pytest.fail(f"{page.name}: azureml-strategy {shlex.join(words)}: {capsys.readouterr().err}")


def test_the_recipes_take_their_overrides() -> None:
    register_resolvers()
    shipped = {recipe.name: recipe for recipe in shipped_recipes()}
    shown = {tuple(words) for page in PAGES for words in commands(page)}
    for verb, *words in sorted(shown):
        recipes = [shipped[word] for word in words[:1] if word in shipped]
        overrides = [
            word.replace("$IMAGE", "job.environment.name=azureml:training@latest")
            for before, word in pairwise([verb, *words])
            if is_override(word) and before not in ("--sweep", "--input")
        ]
        if verb in ("train", "submit", "study") and recipes and "hydra/sweeper=optuna" not in overrides:
            check_overrides(recipes[0], overrides)


@pytest.mark.parametrize("page", [page for page in PAGES if "submit " in page.read_text()], ids=lambda page: page.stem)
def test_scripts_and_commands_can_be_submitted_as_shown(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train.py", "before.py", "after.py"):
        Path(name).touch()
    for verb, *words in commands(page):
        if verb == "submit" and (
            words[0].endswith(".py") or words[0].startswith("-") or words[0] in ("bench", "doctor")
        ):
            end = words.index("--") if "--" in words else len(words)
            assert main([verb, *words[:end], "--dry-run", *words[end:]]) == 0, capsys.readouterr().err


def test_the_architecture_names_files_that_there_are() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    package = ROOT / "src" / "azureml_strategy"
    named = {name for name in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", text) if not name.startswith("tests/")}
    assert len(named) > 30
    assert not sorted(name for name in named if not (package / name).is_file())


def test_the_architecture_describes_every_room() -> None:
    rows = re.findall(
        r"^\| (`[a-z_`, ]+`) \|", (ROOT / "ARCHITECTURE.md").read_text().partition("## Seven walks")[0], re.M
    )
    described = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    folders = {path.parent.name for path in (ROOT / "src" / "azureml_strategy").glob("*/__init__.py")}
    assert described == folders - {"conf", "recipes", "environments"}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_a_page_begins_with_whom_it_is_for(page: Path) -> None:
    _, first, *_ = page.read_text().split("\n\n")
    assert first.startswith(("For ", "This site is for ")), first


def test_every_page_that_is_linked_is_there() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_nothing_that_is_printed_installs_from_pypi_where_there_is_no_release() -> None:
    """Pages, messages, recipes, templates of `init`: what they say can be typed today."""
    folders = ("src", "docs", "conf", "recipes", "project", "environments", "examples", "release")
    files = [
        path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".md", ".yaml", ".txt")
    ]
    files += [path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"]  # which says what was
    files.append(ROOT / "constraints.txt")
    wrong = re.compile(r"pip install (?:-\S+ (?:\S+\.txt )?)*'?azureml[-_]strategy(?!-\S*\.whl)")
    found = [f"{path}: {match[0]}" for path in files if (match := wrong.search(path.read_text(encoding="utf-8")))]
    assert found == []
    assert wrong.search("pip install -c constraints.txt 'azureml-strategy[azure]'")


def test_the_first_page_is_plain_markdown_and_names_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    assert "```{" not in index.read_text()
    linked = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+\.md)\)", index.read_text())}
    assert {page for page in PAGES if page != index} <= linked


@pytest.mark.parametrize("page", FIGURES, ids=lambda page: page.stem)
def test_the_tables_have_the_figures_of_the_results(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    figures = importlib.import_module("figures")
    assert set(figures.PAGES) == set(FIGURES)
    assert figures.filled(page) == page.read_text(), "type: python benchmarks/figures.py"
