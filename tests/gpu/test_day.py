"""`make gpu`: what becomes of its programs, and that they fit into its time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import on_a_gpu

    return on_a_gpu


def test_all_benchmarks_of_a_gpu_fit_into_eight_minutes(day: Any) -> None:
    programs = day.programs(smoke=False)
    scripts = {path.stem for path in BENCHMARKS.glob("*_gpu.py")} - {"on_a_gpu"}
    assert {program.name for program in programs} == {"test_gpu", *scripts}
    assert sum(program.limit_s for program in programs) <= 480


@pytest.mark.parametrize(
    ("code", "became"),
    [
        ("import pathlib, sys; pathlib.Path(sys.argv[2], 'one.json').touch()", "ok"),
        ("", "wrote no JSON"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import time; time.sleep(60)", "ended after 1 s"),
    ],
)
def test_what_becomes_of_a_program(day: Any, tmp_path: Path, code: str, became: str) -> None:
    command, limit_s = (sys.executable, "-c", code), 1.0 if "60" in code else 60.0
    assert day.run(day.Program("one", command, "--results", limit_s), tmp_path)[0] == became
