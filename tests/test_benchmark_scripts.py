"""No script of benchmarks/ is left alone: the table names it, and a test starts it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = {path.stem for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
# Writes the tables of the pages, and measures nothing.
FIGURES = "figures"


def test_each_script_has_a_smoke_test() -> None:
    """One of its name, in which its name stands."""
    tree = ast.parse(Path(__file__).with_name("test_benchmarks.py").read_text())
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    started = {node.name.removeprefix("test_"): ast.unparse(node) for node in tests}
    assert {name for name, text in started.items() if re.search(rf"['\"/ ]{name}(\.py)?['\"]", text)} == SCRIPTS


def test_the_table_has_each_script() -> None:
    rows = re.findall(r"^\| `(\w+)\.py`", (BENCHMARKS / "README.md").read_text(), re.M)
    assert sorted(rows) == sorted(SCRIPTS - {FIGURES})
