"""Starts the disturbed training as a job of one process a node, and sees it end in bounded time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests import preloaded
from tests.emulated import SHARED_MACHINE, launches
from tests.faults.fault import Attempt, Fault
from tests.faults.oracle import newest_whole
from tests.faults.orders import NAMESPACE_VARIABLE, VARIABLE, to_text

from azureml_strategy.cluster.emulated import EmulatedAttempt, EmulatedRun, azure_variables, without_job_variables
from azureml_strategy.cluster.environ import EVENTS_VARIABLE
from azureml_strategy.emulator import processes
from azureml_strategy.emulator.nodes import reserved_port
from azureml_strategy.emulator.processes import Outcome, Process, run_together

ROOT = Path(__file__).parents[2]
# Bounded time: the time limit of a collective, twice, and room for a machine that is busy.
LONGEST_SECONDS = 240.0


@dataclass(frozen=True)
class Ended:
    """How an attempt ended.

    Attributes:
        outcome: of its processes.
        hung: whether it had to be ended.
        met: the faults that have truly happened.
        newest: the checkpoint that it had to go on from; None from the beginning.
        went_on_from: the one that rank 0 did go on from.
        trained: whether rank 0 came to train.
        complete: whether all ranks came to the end of the training.
    """

    outcome: Outcome
    hung: bool
    met: tuple[Fault, ...]
    newest: str | None
    went_on_from: str | None
    trained: bool
    complete: bool


def run_attempt(
    attempt: Attempt, number: int, run: EmulatedRun, command: Sequence[str], faults: Sequence[Fault]
) -> Ended:
    """Run one attempt, and all that happens to it, to its end."""
    done, results = attempt.output / "done.jsonl", attempt.output / "results"
    done.unlink(missing_ok=True)
    shutil.rmtree(results, ignore_errors=True)
    with ExitStack() as around:
        for fault in faults:
            around.enter_context(fault.around(attempt))
        newest = newest_whole(attempt.checkpoints)
        port = around.enter_context(reserved_port())
        overdue = around.enter_context(_at_most(LONGEST_SECONDS))
        outcome = run_together(_processes(attempt, number, run, port, command, faults))
    notes = [json.loads(line) for line in done.read_text().splitlines()] if done.exists() else []
    orders = {note.get("order") for note in notes}
    met = [each for each in faults if each in attempt.met or any(order.text() in orders for order in each.orders)]
    starts = [note["went_on_from"] for note in notes if "went_on_from" in note and note["rank"] == 0]
    return Ended(
        outcome=outcome,
        hung=overdue.is_set(),
        met=tuple(met),
        newest=newest,
        went_on_from=starts[0] if starts else None,
        trained=bool(starts),
        complete=len(list(results.glob("*.json"))) == attempt.ranks,
    )


def _processes(
    attempt: Attempt, number: int, run: EmulatedRun, port: int, command: Sequence[str], faults: Sequence[Fault]
) -> list[Process]:
    orders = to_text([order for fault in faults for order in fault.orders])
    isolated = {"GLOO_SOCKET_IFNAME": "eth0"} if attempt.nodes else {}
    restart = EmulatedAttempt(number, "LowPriority")
    made = []
    for launch in launches(attempt.addresses, 1, port):
        environ = {
            **without_job_variables(os.environ),
            "AZUREML_STRATEGY_THROUGHPUT": "off",  # measures time, which no two runs have alike
            **SHARED_MACHINE,
            **isolated,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
            "RESULTS": str(attempt.output / "results"),
            EVENTS_VARIABLE: "off",
            VARIABLE: orders,
            **azure_variables(launch, "pytorch", attempt.addresses, run, attempt=restart),
            **attempt.environ,
            **attempt.rank_environ.get(launch.rank, {}),
        }
        if attempt.nodes:
            environ[NAMESPACE_VARIABLE] = attempt.nodes.namespace(launch.rank)
        made.append(Process(f"rank {launch.rank}", f"node {launch.rank}", command, environ))
    return made


@contextmanager
def _at_most(seconds: float) -> Iterator[threading.Event]:
    """End what runs in here as Ctrl-C would, when it takes longer; the event says that it did."""
    overdue = threading.Event()

    def interrupt() -> None:
        overdue.set()
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield overdue
    finally:
        timer.cancel()


@contextmanager
def forked_ranks(grace_s: float = 3.0) -> Iterator[None]:
    """Ranks come from a process that has imported torch, and those of a dead job are gone soon."""
    before = processes._start, processes._GRACE_SECONDS
    processes._start, processes._GRACE_SECONDS = preloaded.start_forked, grace_s
    try:
        yield
    finally:
        processes._start, processes._GRACE_SECONDS = before
