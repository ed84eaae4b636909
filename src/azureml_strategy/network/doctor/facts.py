"""Facts about the machine, the job and the software, read before any check judges them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.job import Job, read_job
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.cluster.launchers import detect_launch
from azureml_strategy.network.nccl import NetworkPlan, plan_nccl
from azureml_strategy.network.node import Node, read_node


@dataclass(frozen=True)
class Facts:
    """The machine, the job and the software."""

    root: Path  # the folder that holds `sys`, `proc`, `dev` and the rest
    environ: Mapping[str, str]
    launch: Launch | None  # None if no launcher determines it or its variables cannot be trusted
    launch_error: LaunchError | None  # why the launcher's variables give no launch
    job: Job | None
    node: Node
    plan: NetworkPlan  # the settings that our strategies would make
    versions: Mapping[str, str | None]  # None for a package that is not installed

    @property
    def num_nodes(self) -> int:
        """Number of machines that the job's nodes run on; emulated nodes share one machine."""
        return self.launch.separate_machines if self.launch else 1

    def to_json(self) -> dict[str, Any]:
        """The facts as a dictionary for JSON, without the environment and the subscription."""
        job = asdict(self.job) if self.job else None
        if job:
            del job["subscription"]
        node = asdict(self.node)
        node["topology_file"] = str(self.node.topology_file) if self.node.topology_file else None
        launch = asdict(self.launch) if self.launch else None
        return {"launch": launch, "job": job, "node": node, "plan": asdict(self.plan), "versions": dict(self.versions)}


def read_facts(root: Path, environ: Mapping[str, str], versions: Mapping[str, str | None]) -> Facts:
    """Read all facts. A fact that cannot be read counts as absent."""
    launch, launch_error = None, None
    try:
        launch = detect_launch(environ)
    except LaunchError as error:
        launch_error = error
    node = read_node(root, environ)
    plan = plan_nccl(node, num_nodes=launch.separate_machines if launch else 1, environ=environ, root=root)
    return Facts(
        root=root,
        environ=environ,
        launch=launch,
        launch_error=launch_error,
        job=read_job(environ),
        node=node,
        plan=plan if has_accelerators(node) else plan.for_gloo(),
        versions=versions,
    )


def has_accelerators(node: Node) -> bool:
    """Whether NCCL matters: there are GPUs or RDMA adapters, or should be GPUs according to the VM size."""
    return bool(node.gpus.models or node.hcas or (node.vm_size and node.vm_size.gpus != 0))
