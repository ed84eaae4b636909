"""Writes the environment variables that Azure ML would set for a given launch, which `launchers` reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from azureml_strategy.cluster.environ import (
    BATCH_PORT,
    EVENTS_VARIABLE,
    PLANNED_VARIABLES,
    SWITCHES,
    copied,
    in_azure_ml,
)
from azureml_strategy.cluster.launch import Launch

DISTRIBUTIONS = ("pytorch", "mpi", "tensorflow", "none")
# An emulated job must not inherit these from its shell: they belong to another job or to a launcher. Names of the same
# kind are settings, which stay: OMPI_MCA_btl, OMPI_ALLOW_RUN_AS_ROOT, PMIX_MCA_gds, SLURM_CONF, AZURE_ML_WORKSPACE.
_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "MASTER_IP"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE", "NODE_COUNT", "GPU_PER_NODE_COUNT"),
    *("TF_CONFIG", "RAY_ADDRESS", "VK_TASK_INDEX", "VC_TASK_INDEX", "VC_WORKER_HOSTS", "VC_WORKER_NUM"),
    *("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE"),
    *("TORCHELASTIC_USE_AGENT_STORE", "OMPI_UNIVERSE_SIZE", "OMPI_NUM_APP_CTX", "OMPI_FIRST_RANKS", "OMPI_ARGV"),
    *("OMPI_APP_CTX_NUM_PROCS", "OMPI_FILE_LOCATION", "OMPI_COMMAND", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "PRTE_LAUNCHED",
)
_FAMILIES = re.compile(
    r"(?:AZUREML_|AZ_BATCH|AMLARC_|OMPI_COMM_WORLD_|OMPI_WORLD_|MV2_COMM_WORLD_|PMI_|PMIX_(?!MCA_|INSTALL_PREFIX$)"
    r"|SLURM_(?!CONF$))\w+"
)
# Removed only if the shell is one of a job: then the job has set them.
_PATHS_OF_A_JOB = re.compile(r"AZURE_ML_(?:INPUT|OUTPUT)_\w+")
# Removed only if mpirun has started the shell: by these, MPI_Init finds mpirun. Sources: setup_fork and
# setup_child in schizo_ompi.c of Open MPI 3 and 4; for 5, pmdl_ompi.c of OpenPMIx.
_OF_MPIRUN = re.compile(
    r"OMPI_MCA_(?:ess|ess_base_jobid|ess_base_vpid|pmix|initial_wdir|num_procs|cpu_type|shmem_RUNTIME_QUERY_hint"
    r"|mpi_oversubscribe|orte_(?:hnp_uri|local_daemon_uri|app_num|num_nodes|num_restarts|launch|tmpdir_base"
    r"|bound_at_launch|base_applied_binding|precondition_transports|top_session_dir|jobfam_session_dir|ess_\w+))"
)
# Our variables that stay in the environment: the user sets them, or they belong to settings that stay.
_KEPT = (*SWITCHES, EVENTS_VARIABLE, PLANNED_VARIABLES)

_CLUSTER = "emulated"  # name of the cluster of an emulated job


@dataclass(frozen=True)
class EmulatedRun:
    """The MLflow run of an emulated job.

    Attributes:
        run_id: job name, which in Azure ML is also the MLflow run id.
        experiment: experiment name.
        experiment_id: MLflow's id of the experiment.
        tracking_uri: MLflow's tracking URI.
    """

    run_id: str
    experiment: str
    experiment_id: str
    tracking_uri: str


@dataclass(frozen=True)
class EmulatedAttempt:
    """One attempt of an emulated job."""

    number: int = 0  # of previous attempts
    priority: str = "Dedicated"  # of the nodes, as Azure ML writes it; the other one is `LowPriority`


def azure_variables(
    launch: Launch,
    distribution: str,
    addresses: Sequence[str],
    run: EmulatedRun,
    port: int | None = None,
    attempt: EmulatedAttempt = EmulatedAttempt(),
) -> dict[str, str]:
    """Return the variables that Azure ML sets for one process of the job, and no others.

    Args:
        launch: this process's place in the job.
        distribution: one of `DISTRIBUTIONS`; `none` is a job without a `distribution` block.
        addresses: the address of each node, node 0 first.
        run: the run that the job belongs to.
        port: MASTER_PORT under `mpi` and `tensorflow`. Azure ML does not set it there, but a job may.
        attempt: the attempt of the job.
    """
    given = {} if port is None else {"MASTER_PORT": str(port)}
    return {
        **_job_variables(launch, run, attempt),
        **_node_variables(launch, addresses),
        **_launcher_variables(launch, distribution, addresses),
        **given,
    }


def without_job_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a shell as it is outside any job, with all settings of the user's."""
    families = [_FAMILIES]
    families += [_PATHS_OF_A_JOB] * in_azure_ml(environ)
    families += [_OF_MPIRUN] * ("OMPI_COMM_WORLD_RANK" in environ)
    return {
        name: value
        for name, value in copied(environ).items()
        if name in _KEPT or not (name in _NAMES or any(family.fullmatch(name) for family in families))
    }


EMULATED_TAG = "azureml_strategy.emulated"
"""Tag of the MLflow run of an emulated job, whose figures are those of one machine."""


def is_emulated(environ: Mapping[str, str]) -> bool:
    """Tell whether a process belongs to an emulated job, whose nodes share the disks of one machine."""
    return environ.get("AZ_BATCHAI_CLUSTER_NAME") == _CLUSTER


def _job_variables(launch: Launch, run: EmulatedRun, attempt: EmulatedAttempt) -> dict[str, str]:
    context = {"vm_priority": attempt.priority, "run_attempt_count": attempt.number}
    return {
        "AZUREML_RUN_ID": run.run_id,
        "AZUREML_ROOT_RUN_ID": run.run_id,
        "AZUREML_EXPERIMENT_ID": run.experiment_id,
        "AZUREML_ARM_PROJECT_NAME": run.experiment,
        "AZUREML_ARM_WORKSPACE_NAME": "emulated",
        "AZUREML_ARM_RESOURCEGROUP": "emulated",
        "AZUREML_ARM_SUBSCRIPTION": "00000000-0000-0000-0000-000000000000",
        "AZUREML_PROCESS_NAME": f"rank_{launch.rank}",
        "AZUREML_CR_COMPUTE_CONTEXT": json.dumps(context),
        "MLFLOW_TRACKING_URI": run.tracking_uri,
        "MLFLOW_RUN_ID": run.run_id,
        "MLFLOW_EXPERIMENT_NAME": run.experiment,
        "MLFLOW_EXPERIMENT_ID": run.experiment_id,
    }


def _node_variables(launch: Launch, addresses: Sequence[str]) -> dict[str, str]:
    is_master = str(launch.node_rank == 0).lower()
    variables = {
        "AZUREML_NODE_COUNT": str(launch.num_nodes),
        "AZUREML_CR_NODE_RANK": str(launch.node_rank),
        "AZ_BATCHAI_CLUSTER_NAME": _CLUSTER,
        "AZ_BATCHAI_IS_CURRENT_NODE_MASTER": is_master,
        "AZ_BATCH_IS_CURRENT_NODE_MASTER": is_master,
        "AZ_BATCHAI_JOB_MASTER_NODE_IP": addresses[0],
        # Since August 2022, Azure ML also sets it in jobs without MPI. On one node it is `localhost`.
        "AZ_BATCHAI_MPI_MASTER_NODE": addresses[0] if launch.num_nodes > 1 else "localhost",
    }
    if launch.num_nodes > 1:
        variables |= {
            "AZ_BATCH_MASTER_NODE": f"{addresses[0]}:{BATCH_PORT}",
            "AZ_BATCH_HOST_LIST": ",".join(addresses),
            "AZ_BATCH_NODE_LIST": ";".join(addresses),
        }
    return variables


def _launcher_variables(launch: Launch, distribution: str, addresses: Sequence[str]) -> dict[str, str]:
    workers = [f"{address}:{2222 + i}" for address in addresses for i in range(launch.local_world_size)]
    tensorflow = {
        "cluster": {"worker": workers, "ps": []},
        "task": {"type": "worker", "index": launch.rank},
        "environment": "cloud",
    }
    variables: dict[str, dict[str, str | int]] = {
        "pytorch": {
            "MASTER_ADDR": launch.main_address,
            "MASTER_PORT": launch.main_port,
            "WORLD_SIZE": launch.world_size,
            "NODE_RANK": launch.node_rank,
            "RANK": launch.rank,
            "LOCAL_RANK": launch.local_rank,
        },
        "mpi": {
            "OMPI_COMM_WORLD_RANK": launch.rank,
            "OMPI_COMM_WORLD_SIZE": launch.world_size,
            "OMPI_COMM_WORLD_LOCAL_RANK": launch.local_rank,
            "OMPI_COMM_WORLD_LOCAL_SIZE": launch.local_world_size,
            "OMPI_COMM_WORLD_NODE_RANK": launch.local_rank,  # Open MPI counts within the node here too
            "OMPI_UNIVERSE_SIZE": launch.world_size,
            "AZ_BATCHAI_TASK_INDEX": launch.rank,
        },
        "tensorflow": {"TF_CONFIG": json.dumps(tensorflow)},
        "none": {},
    }
    return {name: str(value) for name, value in variables[distribution].items()}
