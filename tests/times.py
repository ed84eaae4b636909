"""`pytest --times=FILE` writes what each test and file takes: wall, processor and waiting seconds.

The processor's are those of a test's process, of the children it has waited for, and of the programs that its fork
server has forked and seen the end of: /proc/PID/stat counts these for the server. With `--workers`, what several tests
do at the same time takes longer than alone.

`python -m tests.times FILE...` keeps of them in tests/times.json what tests/workers.py and tests/rota.py plan with.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_KEPT = Path(__file__).with_name("times.json")
# Tests that take less are all expected to take what those of their file do on average.
_WORTH_KEEPING = 1.0
_UNKNOWN = (0.05, 0.05)
_TICKS = os.sysconf("SC_CLK_TCK")


class Meter:
    """Measures one test after another.

    Args:
        server: the process that forks this one's programs, if one does.
    """

    def __init__(self, server: int | None) -> None:
        self._server = server
        self.start()

    def start(self) -> None:
        self._wall, self._processor = time.perf_counter(), self._used()

    def stop(self) -> tuple[float, float]:
        """Wall and processor seconds since the start."""
        return time.perf_counter() - self._wall, self._used() - self._processor

    def _used(self) -> float:
        used = 0.0
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            usage = resource.getrusage(who)
            used += usage.ru_utime + usage.ru_stime
        return used + (_of_server(self._server) if self._server else 0.0)


def _of_server(pid: int) -> float:
    """Seconds of the server, and of all that it forked and that have ended: proc_pid_stat(5), fields 14 to 17."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS


@dataclass
class Times:
    """What the tests of this session have taken."""

    tests: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, test: str, wall: float, processor: float) -> None:
        self.tests[test] = (wall, processor)

    def as_json(self, exhaustive: Collection[str] = ()) -> dict[str, object]:
        """`{"tests": {name: {"wall": s, "processor": s, "waiting": s}}, "files": {...}}`, what computes most first.

        Args:
            exhaustive: names of tests that are not always run; these are listed.
        """
        files: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        for test, (wall, processor) in self.tests.items():
            file = test.partition("::")[0]
            files[file] = (files[file][0] + wall, files[file][1] + processor)
        return {
            "tests": _table(self.tests),
            "exhaustive": sorted(self.tests.keys() & set(exhaustive)),
            "files": _table({name: (each[0], each[1]) for name, each in files.items()}),
        }


def _table(times: dict[str, tuple[float, float]]) -> dict[str, dict[str, float]]:
    return {
        name: {"wall": round(wall, 3), "processor": round(used, 3), "waiting": round(max(wall - used, 0.0), 3)}
        for name, (wall, used) in sorted(times.items(), key=lambda each: -each[1][1])
    }


@dataclass(frozen=True)
class Expected:
    """What tests took when they were last measured: seconds of wall and of processor."""

    tests: dict[str, tuple[float, float]]
    files: dict[str, tuple[float, float]]

    @classmethod
    def read(cls) -> Expected:
        if not _KEPT.exists():
            return cls({}, {})
        kept = json.loads(_KEPT.read_text())
        return cls(
            {name: (each[0], each[1]) for name, each in kept["tests"].items()},
            {name: (each[0], each[1]) for name, each in kept["other_tests_of"].items()},
        )

    def of(self, test: str) -> tuple[float, float]:
        return self.tests.get(test) or self.files.get(test.partition("::")[0]) or _UNKNOWN


def keep(measured: Sequence[Path], kept: Path = _KEPT) -> None:
    """Write what is worth knowing of measurements: each long or exhaustive test, and the mean of a file's others."""
    tests: dict[str, tuple[float, float]] = {}
    exhaustive = set[str]()
    for path in measured:
        found = json.loads(path.read_text())
        exhaustive |= set(found["exhaustive"])
        tests |= {name: (each["wall"], each["processor"]) for name, each in found["tests"].items()}
    long = {name: taken for name, taken in tests.items() if max(taken) >= _WORTH_KEEPING or name in exhaustive}
    others: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, taken in tests.items():
        if name not in long:
            others[name.partition("::")[0]].append(taken)
    means = {name: [sum(part) / len(part) for part in zip(*taken, strict=True)] for name, taken in others.items()}
    table = {
        "tests": {name: [round(part, 2) for part in long[name]] for name in sorted(long)},
        "other_tests_of": {name: [round(part, 3) for part in means[name]] for name in sorted(means)},
    }
    lines = re.sub(r"\[\s+([\d.]+),\s+([\d.]+)\s+\]", r"[\1, \2]", json.dumps(table, indent=0))  # one for each test
    kept.write_text(lines + "\n")


def of(config: pytest.Config) -> Times:
    """The times of a session."""
    found: Times = config.stash.setdefault(_KEY, Times())
    return found


_KEY = pytest.StashKey[Times]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=Path, metavar="FILE", help="write each test's wall, processor and waiting seconds")


def pytest_configure(config: pytest.Config) -> None:
    """A path is where the shell is; tests change their folder."""
    if config.getoption("--times"):
        config.option.times = config.option.times.absolute()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> object:
    """Without workers, this process measures itself."""
    if item.config.pluginmanager.hasplugin("workers"):
        return (yield)
    meter = Meter(None)
    try:
        return (yield)
    finally:
        of(item.config).add(item.nodeid, *meter.stop())


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--times")
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        exhaustive = [item.nodeid for item in session.items if item.get_closest_marker("exhaustive")]
        path.write_text(json.dumps(of(session.config).as_json(exhaustive), indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("Name the files that `pytest --times=FILE` has written.")
    keep([Path(each) for each in sys.argv[1:]])
