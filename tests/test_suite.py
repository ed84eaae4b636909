"""What runs these tests: workers, their times, the rota, the layers, and when the oldest versions are due."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

from tests import oldest, rota
from tests.times import Expected

ROOT = Path(__file__).parents[1]
_OF_ALL_KINDS = """
import os, time, warnings
from pathlib import Path
import pytest
from tests.preloaded import run_forked

@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    Path("{folder}/made").open("a").write("x")
    yield
    Path("{folder}/ended").open("a").write("x")

def test_first(made_once):
    print("said by a test that passes")

def test_second(made_once):
    warnings.warn("a warning of a test")

def test_fails():
    print("said by a test that fails")
    assert 1 == 2

def test_skips():
    pytest.skip("for a reason")

def test_computes_elsewhere(tmp_path):
    (tmp_path / "some.py").write_text("import time\\nwhile time.process_time() < 1: pass")
    assert run_forked([str(tmp_path / "some.py")], dict(os.environ), 60).returncode == 0

def test_waits():
    time.sleep(1)
"""
_THAT_DIES = """
import os, signal, time

def test_is_killed():
    child = os.fork()
    if not child:  # it lives on, and holds what the worker had open
        time.sleep(300)
        os._exit(0)
    open("{folder}/child", "w").write(str(child))
    os.kill(os.getpid(), signal.SIGKILL)

def test_after_it(tmp_path):
    assert not list(tmp_path.iterdir())
"""
_THAT_LEAVE = """
import os, time
import pytest
from tests.preloaded import Forked

def test_forks():
    if os.fork():
        os.wait()

def test_fails_after_it():
    assert 1 == 2

@pytest.mark.timeout(0.5)
def test_takes_too_long():
    time.sleep(60)

def test_leaves_a_program(tmp_path):
    (tmp_path / "some.py").write_text("import time; time.sleep(300)")
    Forked([str(tmp_path / "some.py")], dict(os.environ))
"""
_DIES_BETWEEN_TWO_FILES = """
import os
from tests import workers

own, sent = workers._sent, []

def late(pipe, what):
    sent.append(what)
    if len(sent) == 2:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    return own(pipe, what)

workers._sent = late
"""
# Run by every interpreter of that run: what its fork servers import otherwise, which takes seconds, it has no use for.
_NOTHING_PRELOADED = """
from tests import empty_store, preloaded

preloaded._IMPORTED_ONCE.clear()
empty_store.make = lambda: None
"""


def _environ(folder: Path) -> dict[str, str]:
    """The variables of a run of the tests in a folder."""
    (folder / "sitecustomize.py").write_text(_NOTHING_PRELOADED)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), str(ROOT / "src")])}


def test_forked_workers_tell_all_that_one_process_tells(tmp_path: Path) -> None:
    """What passes, fails, warns and dies; a fixture of a file is made once; a forked program's time counts."""
    (tmp_path / "test_some.py").write_text(_OF_ALL_KINDS.replace("{folder}", str(tmp_path)))
    (tmp_path / "test_other.py").write_text(_THAT_DIES.replace("{folder}", str(tmp_path)))
    plugins = ["-p", "tests.workers", "-p", "tests.times", "--workers=2", f"--times={tmp_path}/times.json"]
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", tmp_path, *plugins, "-rs"]
    with (tmp_path / "told").open("w") as output, (tmp_path / "errors").open("w") as errors:
        done = subprocess.run([*command, tmp_path], env=_environ(tmp_path), stdout=output, stderr=errors)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)  # the run did not wait for it
    told, wrong = (tmp_path / "told").read_text(), (tmp_path / "errors").read_text()
    assert done.returncode == 1, told + wrong
    assert not wrong
    assert "2 failed, 5 passed, 1 skipped" in told
    assert "said by a test that fails" in told
    assert "said by a test that passes" not in told
    assert "UserWarning: a warning of a test" in told
    assert "for a reason" in told
    assert "the worker that ran test_other.py::test_is_killed was killed by SIGKILL" in told
    assert (tmp_path / "made").read_text() == (tmp_path / "ended").read_text() == "x"
    times = json.loads((tmp_path / "times.json").read_text())
    assert times["tests"]["test_some.py::test_computes_elsewhere"]["processor"] > 0.9
    assert times["tests"]["test_some.py::test_waits"]["waiting"] > 0.8
    assert times["files"]["test_some.py"]["wall"] > 2


def test_what_a_test_leaves_takes_nothing_from_the_others(tmp_path: Path) -> None:
    """A child that comes back from its test, one that takes too long, and a program that nobody waits for."""
    (tmp_path / "test_some.py").write_text(_THAT_LEAVE)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", tmp_path, "-p", "tests.workers"]
    command += ["--workers=1", tmp_path]
    done = subprocess.run(command, env=_environ(tmp_path), capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 2 passed" in done.stdout
    assert "FAILED test_some.py::test_fails_after_it - assert 1 == 2" in done.stdout
    assert "FAILED test_some.py::test_takes_too_long - Failed: Timeout" in done.stdout


def test_a_worker_that_dies_between_two_files_is_told_and_the_rest_runs(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(_DIES_BETWEEN_TWO_FILES)
    for name, does in (("a", "threading.Timer(0.5, os._exit, [7]).start()"), ("b", "pass"), ("c", "pass")):
        (tmp_path / f"test_{name}.py").write_text(f"import os, threading\ndef test_it():\n    {does}\n")
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", tmp_path, "-p", "tests.workers"]
    command += ["--workers=1", tmp_path]
    done = subprocess.run(command, env=_environ(tmp_path), capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 2 passed" in done.stdout
    assert "the worker that ran test_b.py::test_it, after test_a.py::test_it, left with 7" in done.stdout


def test_what_a_worker_cannot_end_fails_the_run(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.fixture(scope='session')\ndef one():\n    yield\n    assert 1 == 2, 'not ended'\n"
    (tmp_path / "test_some.py").write_text(text + "def test_of_it(one):\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", tmp_path, "-p", "tests.workers"]
    command += ["--workers=1", tmp_path]
    done = subprocess.run(command, env=_environ(tmp_path), capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 passed, 1 error" in done.stdout
    assert "it could not end what its tests share" in done.stdout
    assert "AssertionError: not ended" in done.stderr


def test_a_store_is_as_mlflow_makes_it(tmp_path: Path) -> None:
    """Both in processes of their own: this one may have been told how already."""
    ours = "from tests import empty_store; empty_store.make()"
    for name, before in (("own", "pass"), ("copied", ours)):
        script = f"{before}\nfrom mlflow import MlflowClient as C\nC('sqlite:///{name}.db').create_experiment('x')"
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "PYTHONHASHSEED": "0"}
        subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environ, check=True, capture_output=True)
    own, copied = ([*sqlite3.connect(tmp_path / f"{name}.db").iterdump()] for name in ("own", "copied"))
    assert sorted(map(_in_any_order, own)) == sorted(map(_in_any_order, copied))
    assert len(own) > 100


def _in_any_order(statement: str) -> list[str]:
    """The lines of a statement, without the time that it may have; SQLAlchemy keeps a table's constraints in a set."""
    return sorted(line.strip(" ,") for line in re.sub(r"'active',\d+,\d+", "", statement).splitlines())


def test_the_rota_is_the_commits_and_comes_to_each_test() -> None:
    names = [f"test_{number}.py::test" for number in range(100)]
    expected = Expected({name: (1.0, 5.0 + number % 20) for number, name in enumerate(names)}, {})
    expected.tests[names[50]] = (1.0, 2 * rota.SECONDS)
    shares = [rota.share(names, f"commit {number}", expected) for number in range(400)]
    assert rota.share(reversed(names), "commit 7", expected) == shares[7] != shares[8]
    ordinary = [share for share in shares if names[50] not in share]
    assert all(rota.SECONDS - 25 < sum(expected.of(name)[1] for name in share) <= rota.SECONDS for share in ordinary)
    assert set().union(*shares) == set(names)


def test_the_oldest_versions_are_due_where_something_they_depend_on_has_changed(tmp_path: Path) -> None:
    for name in (
        "pyproject.toml",
        "constraints.txt",
        "tests/oldest.txt",
        "src/azureml_strategy/lightning_internals.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert not oldest.have_passed(tmp_path)
    (tmp_path / "tests" / "oldest.tested").write_text(oldest.state(tmp_path) + "\n")
    assert oldest.have_passed(tmp_path)
    (tmp_path / "README.md").write_text("Other words.")
    assert oldest.have_passed(tmp_path)
    with (tmp_path / "src/azureml_strategy/lightning_internals.py").open("a") as file:
        file.write("# changed\n")
    assert not oldest.have_passed(tmp_path)


def test_each_test_is_in_one_layer() -> None:
    """`make test-job`, `test-recipes` and `test-desk` are all of `make test`."""
    say = "layers: ; @echo $(JOB) $(RECIPES) $(DESK)"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # `make test`'s own
    command = ["make", "--eval", say, "layers"]
    said = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    entries = [
        path for path in (ROOT / "tests").iterdir() if path.name.startswith("test_") or any(path.rglob("test_*.py"))
    ]
    assert sorted(said.stdout.split()) == sorted(f"tests/{path.name}" for path in entries)
