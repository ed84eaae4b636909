"""`pytest --rota=COMMIT` also runs a share of the tests marked `exhaustive`, chosen by the commit.

A hash of the commit puts them in an order, and the first that fit into a minute of two processors are run: the same for
the same commit, and others for the next. `make test` does so, for nothing to rot that only `make test-all` runs.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable

import pytest
from tests.times import Expected

SECONDS = 2 * 60.0  # of a processor
_UNKNOWN = 10.0
_KEY = pytest.StashKey[set[str]]()


def share(tests: Iterable[str], commit: str, expected: Expected, seconds: float = SECONDS) -> set[str]:
    """Those that are this commit's.

    Args:
        tests: names of tests, in any order.
        commit: what a hash is made of, with each name.
        expected: what tests take. One whose own time is not known takes what those of its file do, or ten seconds.
        seconds: processor seconds that those that are chosen take together at most, as expected; the first is chosen
            whatever it takes, or the longest would have no turn.
    """
    chosen, left, tests = set[str](), seconds, list(tests)
    of_files: dict[str, list[float]] = defaultdict(list)
    for test in tests:
        if test in expected.tests:
            of_files[_file(test)].append(expected.tests[test][1])
    for test in sorted(tests, key=lambda test: hashlib.sha256(f"{commit} {test}".encode()).digest()):
        others = of_files[_file(test)] or [_UNKNOWN]
        takes = expected.tests[test][1] if test in expected.tests else sum(others) / len(others)
        if takes <= left or not chosen:
            chosen.add(test)
            left -= takes
    return chosen


def _file(test: str) -> str:
    return test.partition("::")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rota", metavar="COMMIT", help="run a share of the exhaustive tests as well, this commit's")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rota: an exhaustive test that is this commit's")
    if config.getoption("--rota"):
        config.option.markexpr = f"({config.option.markexpr or 'True'}) or rota"


@pytest.hookimpl(tryfirst=True)  # before those that no marker selects are taken out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    commit = config.getoption("--rota")
    if not commit:
        return
    exhaustive = {item.nodeid: item for item in items if item.get_closest_marker("exhaustive")}
    chosen = share(exhaustive, commit, Expected.read())
    for test in chosen:
        exhaustive[test].add_marker("rota")
    config.stash[_KEY] = chosen


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """How many there were, and the line that repeats one that failed."""
    chosen = config.stash.get(_KEY, None)
    if chosen is None:
        return
    terminalreporter.section(f"rota of {config.getoption('--rota')[:12]}: {len(chosen)} of the exhaustive tests")
    for report in terminalreporter.getreports("failed") + terminalreporter.getreports("error"):
        if report.nodeid in chosen:
            terminalreporter.line(f'{report.nodeid} failed. Again: python -m pytest -m "" "{report.nodeid}"')
