"""No Trainer or Fabric of a job starts MPI: a broken one ends the process before any error in Python."""

from __future__ import annotations

import importlib
import os

import pytest
from tests.preloaded import run_forked

from azureml_strategy.cluster.emulated import EmulatedRun, azure_variables
from azureml_strategy.cluster.environ import LAUNCH_SWITCH, THROUGHPUT_SWITCH, TRACKING_SWITCH
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.plugin import CONNECTORS

pytest.importorskip("deepspeed")
pytest.importorskip("pytorch_lightning")
STARTED_MPI = 77
FAKE = f"import os\nos._exit({STARTED_MPI})  # as Open MPI's MPI_Init without ssh\n"
SCRIPT = """
import gc
import os
import socket
import sys

import torch
import deepspeed
import lightning.pytorch
import pytorch_lightning
from lightning.fabric import Fabric
from lightning.pytorch.demos.boring_classes import BoringModel

import azureml_strategy.strategies

QUIET = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


def told(environment):
    print(type(environment).__name__, environment.global_rank(), environment.world_size())


def made(**arguments):
    told(lightning.pytorch.Trainer(**arguments, **QUIET).strategy.cluster_environment)


def made_by_the_copy(**arguments):
    told(pytorch_lightning.Trainer(**arguments, **QUIET).strategy.cluster_environment)


def fabric(**arguments):
    told(Fabric(accelerator="cpu", **arguments).strategy.cluster_environment)


def fit(**arguments):
    trainer = lightning.pytorch.Trainer(**arguments, **QUIET, max_steps=1, limit_val_batches=0)
    trainer.fit(BoringModel())
    print(trainer.global_step)


gc.freeze()
# Each job is another process, which need not import all anew.
for environ, call in eval(sys.argv[1]):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.environ.update(environ)
        if "RANK" in environ or "OMPI_COMM_WORLD_RANK" in environ:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        eval(call)
        sys.stdout.flush()
        os._exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        print(f"ended with {code}")
"""


def in_a_job(distribution: str, rank: int = 0, nodes: int = 1) -> dict[str, str]:
    launch = Launch(distribution, rank, nodes, 0, 1, rank, nodes, "127.0.2.1", 6105)
    run = EmulatedRun("quirky_plum", "resnet50", "1", "sqlite:///none.db")
    addresses = [f"127.0.2.{node + 1}" for node in range(nodes)]
    variables = azure_variables(launch, distribution, addresses, run)
    return variables | {TRACKING_SWITCH: "off", THROUGHPUT_SWITCH: "off"}  # a store of its own for each takes seconds


OFF = {LAUNCH_SWITCH: "off"}
# Each call, the jobs in which it is made, and the last line that it prints.
CASES: dict[str, tuple[list[dict[str, str]], list[str]]] = {
    # MPI is asked outside of a job, and where the user wants stock Lightning; or the rest would show nothing.
    "made(strategy='ddp', devices=1)": ([{}, in_a_job("mpi") | OFF], [f"ended with {STARTED_MPI}"] * 2),
    "made(strategy='azureml_ddp')": ([in_a_job("pytorch"), in_a_job("mpi")], ["AzureMLEnvironment 0 1"] * 2),
    "made(strategy='ddp')": ([in_a_job("pytorch")], ["AzureMLEnvironment 0 1"]),
    "made(strategy='ddp', num_nodes=1)": ([in_a_job("none")], ["LightningEnvironment 0 1"]),
    "made_by_the_copy(strategy='ddp', devices=1)": ([in_a_job("pytorch")], ["LightningEnvironment 0 1"]),
    "fabric(strategy='azureml_ddp')": ([in_a_job("mpi")], ["AzureMLEnvironment 0 1"]),
    "fabric(strategy='ddp')": ([in_a_job("pytorch")], ["AzureMLEnvironment 0 1"]),
    "fit(strategy='azureml_ddp')": ([in_a_job("pytorch")], ["1"]),
    "fit(strategy='azureml_deepspeed_stage_2')": ([in_a_job("mpi")], ["1"]),
    # One that is not ours has its ranks from mpirun's variables where it had them from MPI.
    "made(strategy='ddp_spawn', num_nodes=2, devices=1)": (
        [in_a_job("mpi", rank, nodes=2) for rank in range(2)],
        ["AzureMLEnvironment 0 2", "AzureMLEnvironment 1 2"],
    ),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What becomes of each call in its jobs, with an mpi4py on the path whose MPI ends the process."""
    folder = tmp_path_factory.mktemp("path")
    for name, text in {
        "mpi4py/__init__.py": "",
        "mpi4py/MPI.py": FAKE,
        "mpi4py-4.1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: mpi4py\nVersion: 4.1.0\n",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    calls = [(job, f"(print('call'), {call})") for call, (jobs, _) in CASES.items() for job in jobs]
    (folder / "script.py").write_text(SCRIPT)
    done = run_forked([str(folder / "script.py"), repr(calls)], {**os.environ, "PYTHONPATH": str(folder)}, 500)
    assert done.returncode == 0, done.stdout
    last = iter([part.splitlines()[-1] if part else done.stdout for part in done.stdout.split("call\n")[1:]])
    return {call: [next(last) for _ in jobs] for call, (jobs, _) in CASES.items()}


@pytest.mark.parametrize("call", CASES)
def test_nobody_in_a_job_starts_mpi(ends: dict[str, list[str]], call: str) -> None:
    assert ends[call] == CASES[call][1]


@pytest.mark.parametrize("connector", CONNECTORS)
def test_lightning_chooses_environments_where_we_expect_it(connector: str) -> None:
    module = pytest.importorskip(connector)
    assert module is importlib.import_module(connector)
    assert module.MPIEnvironment.__name__ == "LaunchOrMPI"
