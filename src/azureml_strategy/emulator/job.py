"""An emulated job: which processes it has, with which variables, and on which node."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from azureml_strategy.cluster.emulated import DISTRIBUTIONS, EmulatedRun, azure_variables, without_job_variables
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.cluster.variables import BATCH_PORT, DEFAULT_PORT
from azureml_strategy.emulator.errors import EmulationError
from azureml_strategy.emulator.namespaces import IsolatedNodes
from azureml_strategy.emulator.processes import Outcome, Process, run_together
from azureml_strategy.emulator.run import mlflow_run


@dataclass(frozen=True)
class EmulatedJob:
    """What to emulate.

    Attributes:
        command: what each process runs.
        nodes: nodes of the job.
        processes_per_node: processes on each of them.
        distribution: `pytorch`, `mpi`, `tensorflow`, or `none` for a job without a `distribution` block.
        isolate: whether each node gets a network namespace and an address of its own.
        bandwidth: rate of each node's link, such as `1gbit`; with `isolate` only.

    Raises:
        EmulationError: the numbers or the names make no job.
    """

    command: Sequence[str]
    nodes: int = 1
    processes_per_node: int = 1
    distribution: str = "pytorch"
    isolate: bool = False
    bandwidth: str | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise EmulationError("No command was given. Write it last: azureml-strategy emulate -- python train.py")
        if self.nodes < 1 or self.processes_per_node < 1:
            raise EmulationError(
                f"{self.nodes} node(s) x {self.processes_per_node} process(es) is no job. Use at least 1 of each."
            )
        if self.distribution not in DISTRIBUTIONS:
            raise EmulationError(
                f"Azure ML has no distribution {self.distribution!r}. Use one of {', '.join(DISTRIBUTIONS)}."
            )
        if self.bandwidth and not self.isolate:
            raise EmulationError("--bandwidth shapes the links between isolated nodes. Add --isolate.")


def emulate(job: EmulatedJob) -> int:
    """Run the job to its end, its output on this process's standard output.

    Returns:
        0 when all processes ended well, else the exit code of the one that failed first; 130 after Ctrl-C.

    Raises:
        EmulationError: there is no such program, or this machine cannot isolate nodes or shape their links.
    """
    if shutil.which(job.command[0], path=_search_path()) is None:
        raise EmulationError(f"There is no program {job.command[0]!r}. Write the command as without emulation.")
    network = IsolatedNodes(job.nodes, job.bandwidth) if job.isolate else None
    with mlflow_run(isolated=job.isolate) as run, network or nullcontext():
        _announce(job, run)
        outcome = run_together(_processes(job, run, network))
        run_status = {0: "FINISHED", 130: "KILLED", 141: "KILLED", 143: "KILLED"}.get(outcome.exit_code, "FAILED")
        run.end(run_status)
    _report(outcome)
    return outcome.exit_code


def _processes(job: EmulatedJob, run: EmulatedRun, network: IsolatedNodes | None) -> list[Process]:
    # Each node gets an address of its own even without isolation: Linux answers to all of 127.0.0.0/8.
    addresses = network.addresses if network else [f"127.0.2.{node + 1}" for node in range(job.nodes)]
    port = _port(isolated=network is not None)
    processes = []
    for rank in range(job.nodes * job.processes_per_node):
        node, local_rank = divmod(rank, job.processes_per_node)
        launch = Launch(
            launcher=job.distribution,
            rank=rank,
            world_size=job.nodes * job.processes_per_node,
            local_rank=local_rank,
            local_world_size=job.processes_per_node,
            node_rank=node,
            num_nodes=job.nodes,
            main_address=addresses[0],
            main_port=port,
        )
        # Azure ML sets no port under MPI and TensorFlow; a job that shares its machine with others must.
        own_port = None if job.distribution in ("pytorch", "none") or port == DEFAULT_PORT else port
        environ = {
            **_shared_machine(job, isolated=network is not None),
            **azure_variables(launch, job.distribution, addresses, run, own_port),
        }
        prefix = network.command_prefix(node) if network else []
        processes.append(Process(f"rank {rank}", f"node {node}", [*prefix, *job.command], environ))
    return processes


def _port(isolated: bool) -> int:
    """Azure ML's own port where it is free, as it always is on a node of one's own."""
    if isolated:
        return DEFAULT_PORT
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if probe.connect_ex(("127.0.0.1", DEFAULT_PORT)) != 0:
            return DEFAULT_PORT
    while True:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        if port != BATCH_PORT:
            return port


def _shared_machine(job: EmulatedJob, isolated: bool) -> dict[str, str]:
    """The shell's environment, and what makes several nodes fit on one machine."""
    environ = without_job_variables(os.environ)
    processes = job.nodes * job.processes_per_node
    environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))
    environ.setdefault("GLOO_SOCKET_IFNAME", "eth0" if isolated else "lo")
    environ["PATH"] = _search_path()
    environ.setdefault("PYTHONUNBUFFERED", "1")  # Azure ML's images set it; lines would come late otherwise
    return environ


def _search_path() -> str:
    """`python` and `azureml-strategy` mean the ones of this environment, activated or not."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def _announce(job: EmulatedJob, run: EmulatedRun) -> None:
    shape = f"{job.nodes} node(s) x {job.processes_per_node} process(es), distribution {job.distribution}"
    links = f", isolated, {job.bandwidth or 'unshaped'} links" if job.isolate else ""
    print(f"Emulating an Azure ML job: {shape}{links}; run {run.run_id} in {redact_text(run.tracking_uri)}", flush=True)


def _report(outcome: Outcome) -> None:
    if outcome.failed is None:
        return
    print(f"\n{outcome.failed} ended with {outcome.reason}; the other processes were ended. Its last lines:")
    print("".join(f"  {line}\n" for line in outcome.last_lines) or "  (none)\n", end="", flush=True)
