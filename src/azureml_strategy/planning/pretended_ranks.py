"""Starts processes that each believe to be one rank of a job, and reads what they report. It needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from azureml_strategy.cluster.emulated import EmulatedRun, azure_variables, without_job_variables
from azureml_strategy.cluster.environ import (
    CALLBACKS_SWITCH,
    DEFAULT_PORT,
    GUARD_SWITCH,
    LAUNCH_SWITCH,
    PRETEND_VARIABLE,
    SWITCHES,
)
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.planning.errors import PlanError

# At a time: each needs most of a core, and 0.7 GB for its libraries.
_TOGETHER = 2
_LONGEST_S = 600.0
_MOST_NODES = 60_000  # each has an address in 10.0.0.0/16
_LEFT_ON = (GUARD_SWITCH, LAUNCH_SWITCH, CALLBACKS_SWITCH)
_LAST_LINES = 12


@dataclass(frozen=True)
class PretendedJob:
    """A job of which single ranks are tried.

    Attributes:
        command: what each process runs.
        nodes: nodes of the job.
        processes_per_node: processes, and GPUs, of each.
        distribution: of Azure ML, as in `azureml_strategy.cluster.emulated.DISTRIBUTIONS`.

    Raises:
        PlanError: the numbers make no job.
    """

    command: Sequence[str]
    nodes: int
    processes_per_node: int
    distribution: str = "pytorch"

    def __post_init__(self) -> None:
        if not self.command:
            raise PlanError("No command was given. Write it last: --pretend-ranks 64 -- python train.py")
        if self.nodes < 1 or self.processes_per_node < 1:
            raise PlanError(
                f"{self.nodes} node(s) x {self.processes_per_node} process(es) is no job. Use at least 1 of each."
            )
        if self.nodes > _MOST_NODES:
            raise PlanError(f"{self.nodes} nodes are more than can be tried. Use {_MOST_NODES} or fewer.")

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.nodes * self.processes_per_node


def try_ranks(job: PretendedJob, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Start a process for each of some ranks, a few at a time, and return what each reports.

    A report has the keys of `azureml_strategy.planning.pretending.report`: what the rank holds, or an `error`.

    Args:
        job: of which they are ranks.
        ranks: to be tried.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(_TOGETHER) as threads:
        found = threads.map(lambda rank: _try_rank(job, rank, Path(folder)), ranks)
        return dict(zip(ranks, found, strict=True))


def _try_rank(job: PretendedJob, rank: int, folder: Path) -> dict[str, Any]:
    own = folder / f"rank_{rank}"
    own.mkdir()
    file, began = own / "report.json", time.monotonic()
    try:
        process = subprocess.run(
            list(job.command),
            env=_variables(job, rank, file),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_LONGEST_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise PlanError(f"There is no program {job.command[0]!r}. Write the command as without pretending.") from error
    except subprocess.TimeoutExpired:
        return _untold(f"it took no step within {_LONGEST_S:.0f} s", "")
    if not file.is_file():
        reason = f"the process ended with exit code {process.returncode}, and no Trainer of `lightning` took a step"
        return _untold(reason, process.stdout)
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if "error" in report:
        report["error"]["output"] = _last_lines(process.stdout)
    return report | {"process_seconds": round(time.monotonic() - began, 1)}


def _untold(reason: str, output: str) -> dict[str, Any]:
    return {"error": {"kind": "", "text": reason, "where": "", "told": False, "output": _last_lines(output)}}


def _last_lines(output: str) -> list[str]:
    return [redact_text(line) for line in output.splitlines()[-_LAST_LINES:]]


def _variables(job: PretendedJob, rank: int, file: Path) -> dict[str, str]:
    """Return the environment of one rank: Azure ML's variables, and a store of its own in the place of the user's."""
    node, local_rank = divmod(rank, job.processes_per_node)
    addresses = [f"10.0.{number // 250}.{number % 250 + 4}" for number in range(job.nodes)]
    launch = Launch(
        launcher=job.distribution,
        rank=rank,
        world_size=job.ranks,
        local_rank=local_rank,
        local_world_size=job.processes_per_node,
        node_rank=node,
        num_nodes=job.nodes,
        main_address=addresses[0],
        main_port=DEFAULT_PORT,
    )
    store = f"sqlite:///{file.parent / 'mlflow.db'}"
    run = EmulatedRun("0" * 32, "pretended", "0", store)
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    return {
        **without_job_variables(os.environ),
        # The guard alone looks at what the Trainer is given; the others record, save and wait for ranks.
        **{switch: "off" for switch in SWITCHES if switch not in _LEFT_ON},
        **azure_variables(launch, job.distribution, addresses, run),
        "PATH": path,
        "TMPDIR": str(file.parent),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "disabled",
        PRETEND_VARIABLE: str(file),
    }
