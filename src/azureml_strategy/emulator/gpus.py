"""Shares this machine's GPUs out over emulated nodes, so that no two processes get the same one."""

from __future__ import annotations

import os
from dataclasses import dataclass

from azureml_strategy.cluster.environ import describe
from azureml_strategy.emulator.nodes import EmulationError

_NONE = "-1"  # CUDA and HIP end their list of devices at a number that no device has


@dataclass(frozen=True)
class NodeGPUs:
    """The GPUs that each emulated node sees.

    Attributes:
        variable: name of the variable that says which GPUs a process sees.
        values: its value for the processes of each node, node 0 first; empty if it stays as the shell has it.
        line: what to print about the GPUs; empty for nothing.
    """

    variable: str = ""
    values: tuple[str, ...] = ()
    line: str = ""

    def variables(self, node: int) -> dict[str, str]:
        """Return what to set for the processes of a node."""
        return {self.variable: self.values[node]} if self.values else {}


def share_out(nodes: int, processes_per_node: int, gpus_per_node: int | None = None) -> NodeGPUs:
    """Give each node GPUs of its own.

    By default a node gets as many GPUs as it has processes. As on Azure, each process sees the GPUs of its node, and
    takes the one of its local rank. Where there are too few GPUs, all processes run on CPUs, on which every strategy
    works by gloo. They could not share a GPU: NCCL refuses two ranks on one, and the copies of a model would share its
    memory. Nor could gloo replace NCCL there: it sends no tensor of a GPU from one rank to another, which a pipeline
    needs (torch.distributed, table of backends).

    Args:
        nodes: number of nodes; if it changes, the largest.
        processes_per_node: number of processes on each node.
        gpus_per_node: number of GPUs of each node, if it is not that of its processes; 0 for CPUs.

    Raises:
        EmulationError: the machine has fewer GPUs than were asked for.
    """
    variable, visible = _visible_gpus()
    each = processes_per_node if gpus_per_node is None else gpus_per_node
    if nodes * each > len(visible):
        if gpus_per_node is not None:
            raise EmulationError(
                f"--gpus-per-node {gpus_per_node} for {nodes} node(s) needs {nodes * gpus_per_node} GPUs, but torch "
                f"sees {len(visible)} here ({describe(os.environ, [variable])}). Leave it out, or write "
                "--gpus-per-node 0 to run on CPUs."
            )
        line = (
            f"GPUs: this machine shows {len(visible)}, too few for {nodes * processes_per_node} processes, and NCCL "
            "lets no two share one. So all run on CPUs, by gloo. For GPUs, emulate at most "
            f"{len(visible)} process(es)."
        )
        return _hidden(variable, nodes, line) if visible else NodeGPUs()
    if each == 0:
        return _hidden(variable, nodes, "GPUs: these nodes have none, and all run on CPUs.") if visible else NodeGPUs()
    shares = [visible[node * each : (node + 1) * each] for node in range(nodes)]
    line = "GPUs: " + "; ".join(f"node {node} has {', '.join(share)}" for node, share in enumerate(shares)) + "."
    # A single node with all GPUs needs no list. A list would fail for a GPU in MIG parts, which no number names.
    unchanged = nodes * each == len(visible) and nodes == 1
    return NodeGPUs(line=line) if unchanged else NodeGPUs(variable, tuple(map(",".join, shares)), line)


def enough_gpus(nodes: int, processes_per_node: int) -> bool:
    """Tell whether this machine has a GPU for each process."""
    return nodes * processes_per_node <= len(_visible_gpus()[1])


def _visible_gpus() -> tuple[str, list[str]]:
    """Return the variable that chooses GPUs, and the names in it of the GPUs that torch sees here.

    The shell's value may be a list of numbers or of UUIDs. The list ends before the first GPU that is not there. Of
    several MIG parts a process sees the first.
    """
    import torch

    variable = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
    count = torch.cuda.device_count()
    listed = os.environ.get(variable, os.environ.get("CUDA_VISIBLE_DEVICES"))
    names = map(str, range(count)) if listed is None else (name.strip() for name in listed.split(","))
    return variable, list(names)[:count]


def _hidden(variable: str, nodes: int, line: str) -> NodeGPUs:
    return NodeGPUs(variable, (_NONE,) * nodes, line)
