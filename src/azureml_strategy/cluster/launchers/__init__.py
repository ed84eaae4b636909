"""Detects how Azure ML started this process: `detect_launch` tries one reader for each launcher in turn.

The order is from the innermost launcher to the outermost: torchrun started below mpirun overrides mpirun. MPI comes
before PyTorch because mpirun's own variables are unambiguous, while DeepSpeed and Lightning also write the PyTorch
variables under MPI. A reader returns None if its launcher set no variables, and raises if the variables are incomplete.

Many parts of a process ask for its launch. The same variables are parsed once, so that all get the same `Launch`. It
is not kept for good, because a strategy that starts further processes changes the variables, and so does Lightning.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from azureml_strategy.cluster.environ import (
    GUARD_SWITCH,
    JOB_PREFIXES,
    NODE_VARIABLES,
    VARIABLES,
    LaunchError,
    declared_node_rank,
    describe,
    in_azure_ml,
    is_placeholder,
    node_count,
    own_environ,
)
from azureml_strategy.cluster.launch import Launch, PartialLaunch, UnknownNodesError
from azureml_strategy.cluster.launchers import deepspeed, local, mpi, pytorch, ray, tensorflow, torchrun
from azureml_strategy.cluster.launchers.pytorch import PYTORCH_VARIABLES

_READERS = (local.read, torchrun.read, deepspeed.read, mpi.read, pytorch.read, tensorflow.read, ray.read)
# Readers are given these alone: they cannot depend on one that does not count here.
_VARIABLES = frozenset(
    (
        *(*VARIABLES, *PYTORCH_VARIABLES, *torchrun.VARIABLES, *deepspeed.MARKERS, *mpi.VARIABLES),
        *(local.MARKER, *local.NUMBERS, "TF_CONFIG", "RAY_ADDRESS"),
    )
)


def detect_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Detect how Azure ML started this process.

    Azure's own variables take precedence over those that Lightning or DeepSpeed wrote later. As long as no variable of
    a launcher changes, each call returns the same object.

    Args:
        environ: the environment to read; this process's environment by default.

    Returns:
        The launch. None outside Azure ML, and in a job of one node without a `distribution` block: there Lightning's
        own defaults are right.

    Raises:
        UnknownNodesError: no variable gives the number of nodes. `learn_launch` asks the other ranks for it.
        LaunchError: the variables are incomplete or contradict one another, so that no rank can be trusted.
    """
    environ = own_environ() if environ is None else environ
    read = {(name, environ[name]) for name in environ if name in _VARIABLES or name.startswith(JOB_PREFIXES)}
    return _parse(frozenset(read))


def detect_ranks() -> Launch | PartialLaunch | None:
    """Detect this process's launch as far as its own variables give it: always its rank and the world size.

    For what needs no more than these. It never waits for other ranks, as `learn_launch` may.

    Raises:
        LaunchError: as `detect_launch`, but not because the number of nodes is unknown.
    """
    try:
        return detect_launch()
    except UnknownNodesError as error:
        return error.known


# More than one, because a process may also read the variables of others, as `doctor` does.
@lru_cache(maxsize=8)
def _parse(variables: frozenset[tuple[str, str]]) -> Launch | None:
    environ = dict(variables)
    if not in_azure_ml(environ):
        return None
    for read in _READERS:
        launch = read(environ)
        if launch is not None:
            _refuse_part_of_the_job(environ, launch)
            return launch
    _refuse_if_distributed(environ)
    return None


def _refuse_part_of_the_job(environ: Mapping[str, str], launch: Launch) -> None:
    """Raise if the launcher was started on each node separately, so that each node would train alone."""
    job_nodes = node_count(environ)
    if job_nodes is not None and job_nodes != launch.num_nodes:
        raise LaunchError(
            f"`{launch.launcher}` started processes on {launch.num_nodes} node(s), but the job has {job_nodes} "
            f"({describe(environ, [name for name in NODE_VARIABLES if name in environ])}): the others would train "
            "alone. Start it over all nodes, or let Azure ML start the processes: `distribution: {type: pytorch, "
            "process_count_per_instance: 1}` and Trainer(strategy='azureml_ddp')."
        )


def _refuse_if_distributed(environ: Mapping[str, str]) -> None:
    """Refuse to run as rank 0 of 1 if the job has other processes.

    Raises:
        LaunchError: the job has several nodes, or only some of a launcher's variables are set.
    """
    nodes = node_count(environ) or 1
    if nodes > 1 or (declared_node_rank(environ) or 0) > 0:
        raise LaunchError(
            f"This job has several nodes ({_set(environ, NODE_VARIABLES)}), but no launcher gave this process a "
            f"rank ({describe(environ, PYTORCH_VARIABLES)}): every node would train alone on all the data. "
            "Add to the job: `distribution: {type: pytorch, process_count_per_instance: 1}`. If each process is meant "
            f"to work alone, as in a parallel job, set {GUARD_SWITCH}=off."
        )
    half = [name for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if name in environ]
    if half and not _written_by_lightning(environ):
        raise LaunchError(
            f"Some of the launcher's variables are set, but RANK is not ({describe(environ, PYTORCH_VARIABLES)}): this "
            "process cannot know its rank. Let Azure ML set all of them with "
            "`distribution: {type: pytorch}`, or remove those that are set in the job's `environment_variables`."
        )


def _written_by_lightning(environ: Mapping[str, str]) -> bool:
    """On one node Lightning's own launcher writes all the variables but RANK, with MASTER_ADDR=127.0.0.1."""
    return is_placeholder(environ.get("MASTER_ADDR", ""))


def _set(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return describe(environ, [name for name in (*names, "NODE_RANK", "AZUREML_CR_NODE_RANK") if name in environ])
