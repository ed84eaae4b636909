"""What the processes of an emulated job see, and what is refused."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import Any

import pytest
from mlflow import MlflowClient
from tests.emulator.conftest import RunCode

from azureml_strategy.cluster.environ import DEFAULT_PORT
from azureml_strategy.cluster.launchers import detect_launch
from azureml_strategy.emulator import EmulatedJob, EmulationError, emulate

PRINT_ENVIRON = "import json, os; print(json.dumps(dict(os.environ)))"
TORCH = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "NODE_RANK")}
OF_LAUNCHER = {
    "pytorch": TORCH,
    "mpi": OPEN_MPI | {"OMPI_UNIVERSE_SIZE", "AZ_BATCHAI_TASK_INDEX"},
    "tensorflow": {"TF_CONFIG"},
    "none": set(),
}
OF_JOB = (
    {f"AZUREML_{name}" for name in ("RUN_ID", "ROOT_RUN_ID", "EXPERIMENT_ID", "PROCESS_NAME", "CR_COMPUTE_CONTEXT")}
    | {f"AZUREML_ARM_{name}" for name in ("PROJECT_NAME", "WORKSPACE_NAME", "RESOURCEGROUP", "SUBSCRIPTION")}
    | {f"MLFLOW_{name}" for name in ("TRACKING_URI", "RUN_ID", "EXPERIMENT_NAME", "EXPERIMENT_ID")}
    | {"AZUREML_NODE_COUNT", "AZUREML_CR_NODE_RANK", "AZ_BATCHAI_CLUSTER_NAME", "AZ_BATCHAI_JOB_MASTER_NODE_IP"}
    | {"AZ_BATCHAI_IS_CURRENT_NODE_MASTER", "AZ_BATCH_IS_CURRENT_NODE_MASTER", "AZ_BATCHAI_MPI_MASTER_NODE"}
    | {"AZ_BATCH_MASTER_NODE", "AZ_BATCH_HOST_LIST", "AZ_BATCH_NODE_LIST"}
)
# What makes several nodes fit on one machine, also on one with GPUs; LC_CTYPE is Python's own.
OF_MACHINE = {"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PYTHONUNBUFFERED", "PATH", "LC_CTYPE"}
OTHER_JOB = {
    "AZUREML_DATAREFERENCE_images": "/mnt/old",
    "OMPI_COMM_WORLD_RANK": "7",
    "OMPI_MCA_ess": "^singleton",
    "RANK": "7",
    "WORLD_SIZE": "8",
    "TF_CONFIG": "{}",
    "AZ_BATCH_MASTER_NODE": "10.9.9.9:6000",
    "SLURM_JOB_ID": "1",
    "TORCHELASTIC_RUN_ID": "1",
    "MLFLOW_RUN_ID": "another",
    "MLFLOW_EXPERIMENT_ID": "9",
}
MINE = {"MLFLOW_TRACKING_USERNAME": "me", "OMPI_MCA_btl": "tcp"}


@pytest.mark.parametrize("distribution", OF_LAUNCHER)
def test_each_process_gets_the_variables_of_its_place_and_no_others(
    run_code: RunCode, monkeypatch: pytest.MonkeyPatch, distribution: str
) -> None:
    shell = dict(os.environ)
    for name, value in (OTHER_JOB | MINE).items():
        monkeypatch.setenv(name, value)
    job = run_code(PRINT_ENVIRON, nodes=2, processes_per_node=2, distribution=distribution)
    assert (job.exit_code, job.status) == (0, "FINISHED")
    environs = job.json()
    for rank, environ in enumerate(environs):
        added = environ.keys() - shell.keys()
        # Two emulated jobs at once share a machine, which Azure ML's never do: a port is given where 6105 is taken.
        assert (
            added - OF_MACHINE - {"MASTER_PORT"} == OF_JOB | (OF_LAUNCHER[distribution] - {"MASTER_PORT"}) | MINE.keys()
        )
        assert not OTHER_JOB.items() & environ.items()
        assert environ["AZUREML_CR_NODE_RANK"] == str(rank // 2)
    if distribution != "none":
        launches = [detect_launch(environ) for environ in environs]
        assert [(each.rank, each.node_rank, each.local_rank) for each in launches if each] == [
            (0, 0, 0),
            (1, 0, 1),
            (2, 1, 0),
            (3, 1, 1),
        ]
        assert {(each.world_size, each.main_address, each.launcher) for each in launches if each} == {
            (4, "127.0.2.1", distribution)
        }


@pytest.mark.parametrize("distribution", ["pytorch", "mpi"])
def test_a_second_job_beside_the_first_gets_a_port_of_its_own(run_code: RunCode, distribution: str) -> None:
    with socket.socket() as taken:
        # It may be taken already, by another job on this machine, which may end before ours looks. A reusable socket
        # would take it even so, and rank 0 of that job could not listen.
        for _ in range(900):
            with suppress(OSError):
                taken.bind(("127.0.0.1", DEFAULT_PORT))
                taken.listen()
                break
            time.sleep(0.1)
        (environ,) = run_code(PRINT_ENVIRON, distribution=distribution).json()
    assert int(environ["MASTER_PORT"]) not in (DEFAULT_PORT, 6000)


def test_the_run_is_where_mlflow_tracking_uri_says(
    store: MlflowClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = store.tracking_uri.replace("mlflow.db", "other.db")
    os.rename("mlflow.db", "other.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    assert emulate(EmulatedJob(["python", "-c", PRINT_ENVIRON])) == 0
    assert f'"MLFLOW_TRACKING_URI": "{uri}"' in capsys.readouterr().out
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "python")
    assert not os.path.exists("mlflow.db")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"command": []}, "No command was given"),
        ({"nodes": 0}, "0 node.s. x 1 process.es. is no job"),
        ({"processes_per_node": -1}, "is no job"),
        ({"distribution": "slurm"}, "no distribution 'slurm'. Use one of pytorch, mpi, tensorflow, none"),
        ({"bandwidth": "1gbit"}, "Add --isolate"),
    ],
)
def test_numbers_and_names_that_make_no_job(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(EmulationError, match=words):
        EmulatedJob(**{"command": ["true"], **arguments})


@pytest.mark.parametrize("isolate", [False, pytest.param(True, marks=pytest.mark.root)])
def test_an_unknown_program_leaves_no_run_behind(isolate: bool) -> None:
    with pytest.raises(EmulationError, match="There is no program 'pyhton'"):
        emulate(EmulatedJob(["pyhton", "train.py"], isolate=isolate))
    assert not os.listdir()
