"""The output and the end of processes that run side by side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.emulator.conftest import RunCode, soon

from azureml_strategy.emulator import processes
from azureml_strategy.emulator.processes import Process, run_together

WAIT = "import time; time.sleep(60)"
# A process that starts another, writes down both, and waits; the other ignores SIGTERM.
FAMILY = """
import os, pathlib, signal, subprocess, sys, time
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
stubborn += "; print('deaf', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
child.stdout.readline()
if {deaf}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("pids", os.environ["RANK"] + ".part").write_text(f"{{os.getpid()}} {{child.pid}}")
os.rename(f"pids/{{os.environ['RANK']}}.part", f"pids/{{os.environ['RANK']}}")
time.sleep(600)
"""


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    (tmp_path / "pids").mkdir()
    return tmp_path / "pids"


def started(pids: Path) -> list[int]:
    return [int(pid) for file in pids.iterdir() if file.suffix != ".part" for pid in file.read_text().split()]


def python(code: str, name: str = "rank 0") -> Process:
    return Process(name, "node 0", [sys.executable, "-c", code], os.environ)


def test_each_line_says_whose_it_is(run_code: RunCode) -> None:
    code = (
        "import os, sys\n"
        "print('one'); print('two', file=sys.stderr, flush=True); print('10%\\r50%\\r100%'); print('')\n"
        "sys.stdout.buffer.write(b'\\xff no newline')"
    )
    job = run_code(code, nodes=2, processes_per_node=2)
    for rank in range(4):
        lines = job.of_rank(rank)
        assert sorted(lines) == sorted(["one", "two", "100%", "", "\N{REPLACEMENT CHARACTER} no newline"])
        assert f"[rank {rank}, node {rank // 2}] one" in job.output.splitlines()


@pytest.mark.parametrize(
    ("ending", "exit_code", "reason", "status"),
    [
        ("sys.exit(3)", 3, "exit code 3", "FAILED"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL", "FAILED"),
        ("raise ValueError('so')", 1, "exit code 1", "FAILED"),
        ("sys.exit(143)", 143, "exit code 143", "KILLED"),
    ],
)
def test_one_that_fails_ends_all(run_code: RunCode, ending: str, exit_code: int, reason: str, status: str) -> None:
    lines = "print('\\n'.join(map(str, range(40))), flush=True)"
    code = f"import os, signal, sys, time\nif os.environ['RANK'] == '2':\n {lines}\n {ending}\ntime.sleep(3600)"
    job = run_code(code, nodes=2, processes_per_node=2)
    assert (job.exit_code, job.status) == (exit_code, status)
    assert f"rank 2 (node 1) ended with {reason}; the other processes were ended" in job.output
    last = job.output.partition("Its last lines:\n")[2].splitlines()
    assert len(last) == 30
    assert last[-1].strip() == ("ValueError: so" if "raise" in ending else "39")
    assert "  9" not in last


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("deaf", [False, True])
def test_a_signal_leaves_no_process_behind(
    run_code: RunCode, pids: Path, monkeypatch: pytest.MonkeyPatch, signum: int, exit_code: int, deaf: bool
) -> None:
    monkeypatch.setattr(processes, "_GRACE_SECONDS", 0.5)
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    thread = soon(lambda: os.kill(os.getpid(), signum), lambda: len(started(pids)) == 4)
    job = run_code(FAMILY.format(deaf=deaf), nodes=2)
    thread.join()
    assert (job.exit_code, job.status) == (exit_code, "KILLED")
    assert len(started(pids)) == 4
    for _ in range(1000):
        left = [pid for pid in started(pids) if psutil.pid_exists(pid)]
        if not left:
            break
        time.sleep(0.02)
    assert not left
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_what_a_process_started_may_end_in_order_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that a strategy started is a grandchild: it has the grace as well, though its parent is gone at once."""
    monkeypatch.setattr(processes, "_GRACE_SECONDS", 60)
    orderly = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(save()))\n"
    orderly += "def save():\n time.sleep(0.5); open('saved', 'w').close()\nprint('ready', flush=True)\n"
    orderly += "while True:\n time.sleep(0.05)"  # a signal that comes right before a sleep is handled after it
    parent = "import subprocess, sys\n"
    parent += f"child = subprocess.Popen([sys.executable, '-c', {orderly!r}], stdout=-1, stderr=-3)\n"
    parent += "child.stdout.readline(); sys.exit(5)"
    assert run_together([python(parent)]).exit_code == 5
    assert (tmp_path / "saved").exists()


def test_nothing_is_left_when_all_end_well_but_have_started_others(pids: Path) -> None:
    left = "import subprocess, sys\n"
    left += f"print(subprocess.Popen([sys.executable, '-c', {WAIT!r}]).pid, file=open('pid', 'w'))"
    assert run_together([python(left)]).exit_code == 0
    with open("pid") as file:
        pid = int(file.read())
    assert not psutil.pid_exists(pid)


def test_output_that_nobody_reads_any_more_ends_the_job() -> None:
    """As in `azureml-strategy emulate ... | head -1`, which would wait for ever on a full pipe."""
    code = (
        "import os, sys\nfrom azureml_strategy.emulator.processes import Process, run_together\n"
        "many = 'while True: print(\"x\" * 80)'\n"
        "sys.exit(run_together([Process('rank 0', 'node 0', [sys.executable, '-c', many], os.environ)]).exit_code)"
    )
    popen = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert popen.stdout is not None
    assert popen.stderr is not None
    assert popen.stdout.readline().startswith(b"[rank 0, node 0] xxx")
    popen.stdout.close()
    assert popen.stderr.read() == b""
    popen.stderr.close()
    assert popen.wait(timeout=20) == 141
