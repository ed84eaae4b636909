"""Starts real process groups, with the variables of an Azure ML job."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.emulated import SHARED_MACHINE, launches, loopback_addresses, only_documented
from tests.emulator.conftest import _empty_store
from tests.preloaded import start_forked

from azureml_strategy.cluster.emulated import EmulatedRun, azure_variables, without_job_variables
from azureml_strategy.emulator.nodes import reserved_port
from azureml_strategy.emulator.processes import Outcome, Process, run_together

__all__ = ["_empty_store"]  # a fixture
SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Job:
    """How a job ended: its outcome, what was printed, and what each rank's script wrote with `report`."""

    outcome: Outcome
    output: str
    results: dict[int, Any]

    @property
    def exit_code(self) -> int:
        return self.outcome.exit_code

    def each(self, key: str) -> list[Any]:
        return [self.results[rank][key] for rank in sorted(self.results)]


RunJob = Callable[..., Job]


@pytest.fixture
def run_job(
    _empty_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> RunJob:
    """Run a script of tests/multiprocess/scripts as each process of a job, and wait for the end.

    `fresh` starts interpreters, for a test of what they import; `documented` leaves the variables that Azure ML's own
    page lists, and no others of the job.
    """
    shutil.copy(_empty_store, tmp_path / "mlflow.db")

    def run(
        script: str,
        *arguments: object,
        nodes: int = 1,
        processes_per_node: int = 1,
        distribution: str = "pytorch",
        without: Sequence[str] = (),
        extra: Mapping[str, str] | None = None,
        in_job: bool = True,
        fresh: bool = False,
        documented: bool = False,
    ) -> Job:
        addresses = loopback_addresses(nodes)
        with reserved_port(0) as port, monkeypatch.context() as patched:
            processes = []
            for launch in launches(addresses, processes_per_node, port, distribution):
                environ = {**without_job_variables(os.environ), **shared_machine(tmp_path)}
                if in_job:
                    own_port = None if distribution in ("pytorch", "none") else port
                    environ |= azure_variables(launch, distribution, addresses, fake_run(tmp_path), own_port)
                environ = only_documented(environ) if documented else environ
                environ = {name: value for name, value in environ.items() if name not in without} | dict(extra or {})
                command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
                processes.append(Process(f"rank {launch.rank}", f"node {launch.node_rank}", command, environ))
            capsys.readouterr()
            if not fresh:
                patched.setattr("azureml_strategy.emulator.processes._start", start_forked)
            outcome = run_together(processes)
        results = {int(file.stem): json.loads(file.read_text()) for file in (tmp_path / "results").glob("*.json")}
        return Job(outcome, capsys.readouterr().out, results)

    return run


def chosen(cases: str, some: Sequence[str], more: Sequence[str]) -> list[str]:
    """The names of results that a test looks at: some of them, and more where it has `all` cases."""
    return [*some, *more] if cases == "all" else [*some]


@contextmanager
def scripts_on_path() -> Iterator[None]:
    """Let a test import what its script imports, for an oracle."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield
    finally:
        sys.path.remove(str(SCRIPTS))


def fake_run(folder: Path) -> EmulatedRun:
    """A run that is not in its store: rank 0 looks for it and tracks nothing, as these tests do not log."""
    return EmulatedRun("job-1", "tests", "1", f"sqlite:///{folder}/mlflow.db")


def shared_machine(folder: Path) -> dict[str, str]:
    return {**SHARED_MACHINE, "RESULTS": str(folder / "results")}
