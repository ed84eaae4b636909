"""Emulates an Azure ML job of several nodes on this machine: its MLflow run, its processes and its preemption."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from azureml_strategy.cluster.emulated import (
    DISTRIBUTIONS,
    EMULATED_TAG,
    EmulatedAttempt,
    EmulatedRun,
    azure_variables,
    without_job_variables,
)
from azureml_strategy.cluster.environ import DEFAULT_PORT, EVENTS_VARIABLE
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.emulator.gpus import NodeGPUs, share_out
from azureml_strategy.emulator.nodes import EmulationError, IsolatedNodes, reserved_port
from azureml_strategy.emulator.processes import Outcome, PowerCut, Process, error_sentence, run_together
from azureml_strategy.tracking.batch import Batch, End
from azureml_strategy.tracking.offline_queue import OfflineQueue, command
from azureml_strategy.tracking.run import RunRequest
from azureml_strategy.tracking.source import command_run_name
from azureml_strategy.tracking.store import StoreAwayError, StoreRefusedError, one_attempt_client, store_errors

if TYPE_CHECKING:
    from mlflow import MlflowClient

_EXPERIMENT = "emulated"


@dataclass(frozen=True)
class _OpenRun(EmulatedRun):
    """A run that the emulator opens and closes, as Azure ML does."""

    client: MlflowClient

    def end(self, status: str) -> None:
        """Close the run as `FINISHED`, `FAILED` or `KILLED`. If the store fails, write that to a file to send later."""
        end = End(status, int(1000 * time.time()))
        try:
            with store_errors():
                self.client.set_terminated(self.run_id, end.value, end.timestamp_ms)
        except (StoreAwayError, StoreRefusedError) as error:
            print(f"The job's run {self.run_id} could not be marked {status}: {error}")
            self._keep_for_upload(end)

    def _keep_for_upload(self, end: End) -> None:
        folder = Path.cwd()
        try:
            spool = OfflineQueue.create(folder, RunRequest(self.tracking_uri, self.run_id))
            spool.append([Batch("end", [end])])
            spool.close()
        except OSError as error:
            print(f"Nor could that be kept in {folder}: {error}", flush=True)
        else:
            print(f"That and what the job could not log here is sent with: {command(folder)}", flush=True)


@contextmanager
def mlflow_run(isolated: bool, name: str) -> Iterator[_OpenRun]:
    """Open a run in the store of MLFLOW_TRACKING_URI, or in `mlflow.db` in this folder.

    An exception inside the block closes the run as `FAILED`.

    Args:
        isolated: whether the nodes can reach only files, not a server.
        name: name of the run.

    Raises:
        EmulationError: the nodes could not reach the store, or the store does not answer or refuses.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{os.path.abspath('mlflow.db')}"
    if isolated and "://" in uri and not uri.startswith(("sqlite:", "file:")):
        raise EmulationError(
            f"Isolated nodes cannot reach {redact_text(uri)}. Leave MLFLOW_TRACKING_URI unset, or set it to "
            "sqlite:///mlflow.db, or leave --isolate out."
        )
    run = _open(uri, os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT), name)
    try:
        yield run
    except BaseException:
        run.end("FAILED")
        raise


def _open(uri: str, experiment_name: str, name: str) -> _OpenRun:
    try:
        with store_errors():
            client = one_attempt_client(uri)
            experiment = client.get_experiment_by_name(experiment_name)
            experiment_id = experiment.experiment_id if experiment else client.create_experiment(experiment_name)
            run_id = client.create_run(experiment_id, run_name=name, tags={EMULATED_TAG: "true"}).info.run_id
    except (StoreAwayError, StoreRefusedError) as error:
        raise EmulationError(
            f"No run can be opened in {redact_text(uri)}, which a job needs: {error}. Start that server, or unset "
            "MLFLOW_TRACKING_URI to log into mlflow.db here."
        ) from None
    return _OpenRun(run_id, experiment_name, experiment_id, uri, client)


@dataclass(frozen=True)
class Preemption:
    """When a node is preempted.

    Attributes:
        after_s: seconds from the job's start to the announcement.
        notice_s: seconds from the announcement to the node's end. Azure gives a low-priority node at least 30.
    """

    after_s: float
    notice_s: float = 30.0


@contextmanager
def announced(preemption: Preemption, node: str) -> Iterator[tuple[dict[str, str], PowerCut]]:
    """Serve Scheduled Events on this machine's loopback interface, and announce the preemption of a node there.

    As on Azure, only the node itself can ask. The service answers in the format of Azure's documentation. The times of
    the preemption count from now.

    Yields:
        The service's address, by the name of the node, and the announced end of the node.
    """
    announced_at = time.time() + preemption.after_s
    event = {
        "EventId": "00000000-0000-0000-0000-000000000001",
        "EventType": "Preempt",
        "EventStatus": "Scheduled",
        "ResourceType": "VirtualMachine",
        "Resources": [node],
        "NotBefore": formatdate(announced_at + preemption.notice_s, usegmt=True),
        "EventSource": "Platform",
    }

    class Service(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            events = [event] if time.time() >= announced_at else []
            answer = json.dumps({"DocumentIncarnation": len(events), "Events": events}).encode()
            self.send_response(200 if self.headers.get("Metadata") == "true" else 400)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - http.server's name
            """Log nothing: each request would be a line, and there is one a second."""

    power_cut = PowerCut(node, time.monotonic() + preemption.after_s + preemption.notice_s)
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        try:
            yield {node: f"http://127.0.0.1:{server.server_port}/metadata/scheduledevents"}, power_cut
        finally:
            server.shutdown()


@dataclass(frozen=True)
class EmulatedJob:
    """What to emulate.

    Attributes:
        command: the command that each process runs.
        nodes: number of nodes.
        processes_per_node: number of processes on each node.
        distribution: `pytorch`, `mpi`, `tensorflow`, or `none` for a job without a `distribution` block.
        isolate: whether each node gets its own network namespace and address.
        bandwidth: rate of each node's link, such as `1gbit`; only with `isolate`.
        preemption: when to preempt the last node during the first attempt; None for no preemption.
        nodes_after: number of nodes when the job starts again after that; None for as many as before.
        gpus_per_node: number of GPUs that the processes of a node see, and share by local rank; 0 for CPUs. None is
            one for each process if this machine has enough, or else CPUs.

    Raises:
        EmulationError: the settings do not make a job.
    """

    command: Sequence[str]
    nodes: int = 1
    processes_per_node: int = 1
    distribution: str = "pytorch"
    isolate: bool = False
    bandwidth: str | None = None
    preemption: Preemption | None = None
    nodes_after: int | None = None
    gpus_per_node: int | None = None

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
        if self.preemption and self.isolate:
            raise EmulationError(
                "--preempt-after announces the end of a node on this machine's loopback, which isolated nodes cannot "
                "reach. Leave --isolate out."
            )
        if self.nodes_after is not None and (self.preemption is None or self.nodes_after < 1):
            raise EmulationError(
                f"--nodes-after {self.nodes_after} is how many nodes, 1 or more, a job comes back with that loses one. "
                "Add --preempt-after, such as 20s."
            )
        if self.gpus_per_node and self.gpus_per_node < self.processes_per_node:
            raise EmulationError(
                f"--gpus-per-node {self.gpus_per_node} for {self.processes_per_node} process(es) on each node: NCCL "
                "lets no two share a GPU. Use at least as many as processes, or 0 for CPUs."
            )


@dataclass(frozen=True)
class Emulated:
    """The result of an emulated job.

    Attributes:
        exit_code: 0 if all processes succeeded, else that of the process that failed first; 130 after Ctrl-C.
        run: the MLflow run of the job.
        error: the last error of the process that failed first, in one sentence without secrets; empty if none failed.
    """

    exit_code: int
    run: EmulatedRun
    error: str = ""


def emulate(job: EmulatedJob) -> int:
    """Run the job to its end, and print its output on this process's standard output.

    Returns:
        The `exit_code` of `Emulated`.

    Raises:
        EmulationError: see `emulate_run`.
    """
    return emulate_run(job).exit_code


def emulate_run(job: EmulatedJob) -> Emulated:
    """Like `emulate`, but return the MLflow run as well.

    Raises:
        EmulationError: there is no such program, the MLflow run cannot be opened, or this machine cannot isolate nodes
            or shape their links.
    """
    if shutil.which(job.command[0], path=_search_path()) is None:
        raise EmulationError(f"There is no program {job.command[0]!r}. Write the command as without emulation.")
    network = IsolatedNodes(job.nodes, job.bandwidth) if job.isolate else None
    ports = nullcontext(DEFAULT_PORT) if job.isolate else reserved_port()  # isolated nodes have their own ports
    gpus = share_out(max(job.nodes, job.nodes_after or 0), job.processes_per_node, job.gpus_per_node)
    with mlflow_run(job.isolate, command_run_name(job.command)) as run, network or nullcontext(), ports as port:
        shape = f"{job.nodes} node(s) x {job.processes_per_node} process(es), distribution {job.distribution}"
        links = f", isolated, {job.bandwidth or 'unshaped'} links" if job.isolate else ""
        store = redact_text(run.tracking_uri)
        print(f"Emulating an Azure ML job: {shape}{links}; run {run.run_id} in {store}", flush=True)
        if gpus.line:
            print(gpus.line, flush=True)
        if job.preemption:
            outcome = _run_preempted(job, run, gpus, port)
        else:
            outcome = run_together(_processes(job, run, gpus, network, port, EmulatedAttempt(), {}))
        run_status = {0: "FINISHED", 130: "KILLED", 141: "KILLED", 143: "KILLED"}.get(outcome.exit_code, "FAILED")
        run.end(run_status)
    if outcome.failed is None:
        return Emulated(outcome.exit_code, run)
    print(f"\n{outcome.failed} ended with {outcome.reason}; the other processes were ended. Its last lines:")
    print("".join(f"  {line}\n" for line in outcome.last_lines) or "  (none)\n", end="", flush=True)
    return Emulated(outcome.exit_code, run, error_sentence(outcome.last_lines))


def _run_preempted(job: EmulatedJob, run: EmulatedRun, gpus: NodeGPUs, port: int) -> Outcome:
    """Run the job with a preemption, as on low-priority nodes: a node ends, and the same run starts again."""
    assert job.preemption is not None
    attempts = [EmulatedAttempt(number, "LowPriority") for number in range(2)]
    lost = f"node {job.nodes - 1}"
    with announced(job.preemption, lost) as (addresses, power_cut):
        outcome = run_together(_processes(job, run, gpus, None, port, attempts[0], addresses), power_cut)
    if outcome.lost_node is None:
        return outcome
    again = replace(job, nodes=job.nodes_after or job.nodes)
    print(f"\n{lost} was taken away. The job starts again: same run, attempt 1, {again.nodes} node(s).\n", flush=True)
    return run_together(_processes(again, run, gpus, None, port, attempts[1], {}))


def _processes(
    job: EmulatedJob,
    run: EmulatedRun,
    gpus: NodeGPUs,
    network: IsolatedNodes | None,
    port: int,
    attempt: EmulatedAttempt,
    events: Mapping[str, str],
) -> list[Process]:
    # Each node gets its own address even without isolation: Linux answers to all of 127.0.0.0/8.
    addresses = network.addresses if network else [f"127.0.2.{node + 1}" for node in range(job.nodes)]
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
        # Azure ML sets no port under MPI and TensorFlow, but a job that shares its machine with others needs one.
        own_port = None if job.distribution in ("pytorch", "none") or port == DEFAULT_PORT else port
        environ = {
            **_shell_variables(job, isolated=network is not None),
            **gpus.variables(node),
            **azure_variables(launch, job.distribution, addresses, run, own_port, attempt),
        }
        if f"node {node}" in events:
            environ[EVENTS_VARIABLE] = events[f"node {node}"]
        prefix = network.command_prefix(node) if network else []
        processes.append(Process(f"rank {rank}", f"node {node}", [*prefix, *job.command], environ))
    return processes


def _shell_variables(job: EmulatedJob, isolated: bool) -> dict[str, str]:
    """Return the shell's environment, with variables that let several nodes share one machine."""
    environ = without_job_variables(os.environ)
    processes = job.nodes * job.processes_per_node
    environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))
    environ.setdefault("GLOO_SOCKET_IFNAME", "eth0" if isolated else "lo")
    environ["PATH"] = _search_path()
    environ.setdefault("PYTHONUNBUFFERED", "1")  # as Azure ML's images do; otherwise lines come late
    return environ


def _search_path() -> str:
    """Return a PATH where `python` and `azureml-strategy` are this environment's, even if it is not activated."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
