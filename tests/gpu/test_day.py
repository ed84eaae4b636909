"""`make gpu`: what becomes of its programs, and that they fit into its time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.running import Machine, Row
from tests.gpu.started import ids_below, wait_for_end

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import on_a_gpu

    return on_a_gpu


def test_all_benchmarks_of_a_gpu_fit_into_two_goes_of_eight_minutes(day: Any) -> None:
    goes = [day.programs(go) for go in ("right", "fast")]
    scripts = {path.stem for path in BENCHMARKS.glob("*_gpu.py")} - {"on_a_gpu"}
    assert {program.name for go in goes for program in go} == {"test_gpu", *scripts}
    for go in goes:
        assert sum(program.limit_s + day.GRACE_S for program in go) <= 480
    budget = goes[0][0].command[goes[0][0].command.index("--budget") + 1]
    assert float(budget) + 10 <= goes[0][0].limit_s


@pytest.mark.usefixtures("day")
@pytest.mark.parametrize("script", ["resnet50_gpu", "gpt_gpu"])
def test_a_script_of_speed_ends_before_its_limit(day: Any, script: str) -> None:
    limits = {program.name: program.limit_s for program in day.programs("fast")}
    assert limits[script] >= import_module(script).BUDGET_S + 10


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


# Starts a process in a session of its own, which starts another such one; both write their ids and never end.
_DEEP = (
    "import os, subprocess, sys, time; open(f'{sys.argv[1]}/{os.getpid()}', 'w').close(); depth = int(sys.argv[2]);"
    "depth and subprocess.Popen([sys.executable, '-c', sys.argv[3], sys.argv[1], str(depth - 1), sys.argv[3]],"
    " start_new_session=True); time.sleep(600)"
)


def test_no_process_of_a_program_that_took_too_long_lives_on(
    day: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at SIGTERM with what it has; those below it are in sessions of their own."""
    code = (
        f"import signal, subprocess, sys; deep = {_DEEP!r}\n"
        "def end(*_): open(f'{sys.argv[2]}/one.json', 'w').close(); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "subprocess.Popen([sys.executable, '-c', deep, sys.argv[2], '1', deep], start_new_session=True)\n"
        "while True: signal.sigtimedwait([], 0.05)"  # a signal that comes right before a pause is handled after it
    )
    started: list[int] = []

    class Late(subprocess.Popen[bytes]):
        """Its time is over as soon as all are there."""

        def wait(self, timeout: float | None = None) -> int:
            if started:
                return super().wait(timeout)
            started.extend(ids_below(tmp_path, 2))
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)

    monkeypatch.setattr(subprocess, "Popen", Late)
    became, _ = day.run(day.Program("one", (sys.executable, "-c", code), "--results", 60.0), tmp_path)
    assert became == "ended after 60 s"
    assert (tmp_path / "one.json").is_file()
    wait_for_end(started)


@pytest.fixture
def _handlers() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.usefixtures("day", "_handlers")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_what_test_gpu_has_started_and_its_json_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: int
) -> None:
    """Its parts are replaced by one that never ends, and by one that has yet to begin."""
    from tests.gpu import __main__ as command

    def endless_part(machine: Machine) -> list[Row]:
        endless = [sys.executable, "-c", _DEEP, str(tmp_path), "1", _DEEP]
        return [Row("endless", "all", "WRONG", machine.run("endless", endless).failure)]

    def later_part(machine: Machine) -> list[Row]:
        return [Row("later", "all", "WRONG", machine.run("later", [sys.executable, "-c", ""]).failure)]

    def send() -> None:
        try:
            started.extend(ids_below(tmp_path, 2))
        finally:  # nothing else ends the command
            os.kill(os.getpid(), signum)

    started: list[int] = []
    monkeypatch.setattr(command, "parts", lambda: ([endless_part], [later_part]))
    monkeypatch.setattr(sys, "argv", ["gpu", "--accelerator", "cpu", "--budget", "1e6", "--output", str(tmp_path)])
    sender = threading.Thread(target=send)
    sender.start()
    assert command.main() == 1
    sender.join()
    rows = json.loads((tmp_path / "test_gpu.json").read_text())["figures"]["rows"]
    assert [row["words"] for row in rows] == [
        "it took too long: nothing was printed",
        "it took too long: the time was over before it could start",
    ]
    wait_for_end(started)
