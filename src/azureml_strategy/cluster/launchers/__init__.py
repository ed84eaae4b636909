"""One reader for each launcher; `read_launch` asks them in turn.

The order is from the innermost launcher to the outermost: a torchrun started below mpirun overrides it. MPI comes
before PyTorch because mpirun's own variables cannot be confused, while DeepSpeed and Lightning write the PyTorch
ones under MPI. A reader returns None where its launcher left no trace, and raises where the trace is incomplete.
"""

from __future__ import annotations

from collections.abc import Mapping

from azureml_strategy.cluster.errors import LaunchError, seen
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.cluster.launchers import (
    absent,
    deepspeed,
    local,
    mpi,
    pytorch,
    ray,
    tensorflow,
    torchrun,
)
from azureml_strategy.cluster.nodes import NODE_VARIABLES, in_azure_ml, node_count

_READERS = (local.read, torchrun.read, deepspeed.read, mpi.read, pytorch.read, tensorflow.read, ray.read)


def read_launch(environ: Mapping[str, str]) -> Launch | None:
    """See `azureml_strategy.cluster.detect_launch`."""
    if not in_azure_ml(environ):
        return None
    for read in _READERS:
        launch = read(environ)
        if launch is not None:
            _refuse_part_of_the_job(environ, launch)
            return launch
    absent.refuse_if_distributed(environ)
    return None


def _refuse_part_of_the_job(environ: Mapping[str, str], launch: Launch) -> None:
    """A launcher that was started on each node by itself makes each node train alone."""
    job_nodes = node_count(environ)
    if job_nodes is not None and job_nodes != launch.num_nodes:
        raise LaunchError(
            f"`{launch.launcher}` started processes on {launch.num_nodes} node(s), but the job has {job_nodes} "
            f"({seen(environ, [name for name in NODE_VARIABLES if name in environ])}): the others would train "
            "alone. Start it over all nodes, or let Azure ML start the processes: `distribution: {type: pytorch, "
            "process_count_per_instance: 1}` and Trainer(strategy='azureml_ddp')."
        )
