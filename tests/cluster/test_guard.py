"""Real Trainers in the environment of one process of a job; tests/multiprocess/ trains with real groups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from tests.preloaded import run_forked

import azureml_strategy  # noqa: F401 - registers azureml_ddp
from azureml_strategy.cluster import AzureMLEnvironment
from azureml_strategy.cluster.emulated import EmulatedRun, azure_variables
from azureml_strategy.cluster.environ import GUARD_SWITCH, LAUNCH_SWITCH, LaunchError
from azureml_strategy.cluster.guard import LaunchGuard
from azureml_strategy.cluster.launch import Launch

RUN = EmulatedRun("quirky_plum", "resnet50", "1", "file:mlruns")
ADDRESSES = ["10.0.0.4", "10.0.0.5"]
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def inside(monkeypatch: pytest.MonkeyPatch, launcher: str, nodes: int, processes: int, rank: int) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)  # a Trainer tells its rank to the whole process
    monkeypatch.setenv(LAUNCH_SWITCH, "off")  # these tests are about Lightning's own "ddp"
    node_rank, local_rank = divmod(rank, processes)
    launch = Launch(launcher, rank, nodes * processes, local_rank, processes, node_rank, nodes, "10.0.0.4", 6105)
    for name, value in azure_variables(launch, launcher, ADDRESSES[:nodes], RUN).items():
        monkeypatch.setenv(name, value)


def guard_of(trainer: Trainer) -> LaunchGuard:
    return next(callback for callback in trainer.callbacks if isinstance(callback, LaunchGuard))


RIGHT: list[tuple[str, int, int, dict[str, Any]]] = [
    ("pytorch", 1, 1, {}),
    ("pytorch", 1, 1, {"strategy": "azureml_ddp", "devices": 4}),
    ("pytorch", 1, 2, {"strategy": "ddp", "devices": 2}),
    ("pytorch", 2, 1, {"strategy": "ddp", "devices": 1, "num_nodes": 2}),
    ("pytorch", 2, 4, {"strategy": "ddp", "devices": 4, "num_nodes": 2}),
    ("pytorch", 2, 4, {"strategy": "azureml_ddp"}),
    ("mpi", 2, 4, {"strategy": "azureml_ddp"}),
    ("mpi", 2, 1, {"strategy": "azureml_ddp", "devices": 4}),
    ("mpi", 1, 1, {"strategy": "ddp", "devices": 2}),
    ("tensorflow", 2, 1, {"strategy": "azureml_ddp"}),
]


@pytest.mark.parametrize(("launcher", "nodes", "processes", "arguments"), RIGHT)
def test_a_trainer_of_the_jobs_size_passes(
    monkeypatch: pytest.MonkeyPatch, launcher: str, nodes: int, processes: int, arguments: dict[str, Any]
) -> None:
    for rank in {0, nodes * processes - 1}:
        inside(monkeypatch, launcher, nodes, processes, rank)
        trainer = Trainer(**arguments, **QUIET)
        guard_of(trainer).check(trainer)


# (launcher, nodes, processes, the Trainer's arguments, what the error must say)
WRONG: list[tuple[str, int, int, dict[str, Any], str]] = [
    ("pytorch", 2, 1, {}, "wants 1 process.*started 2: 2 node.s. x 1; each group of that size would train alone"),
    ("pytorch", 2, 1, {"strategy": "ddp", "devices": 1}, "num_nodes=1 x devices=1, with DDPStrategy.*train alone"),
    ("pytorch", 1, 2, {"devices": 1}, "with SingleDeviceStrategy.*started 2: 1 node.s. x 2.*train alone"),
    ("pytorch", 1, 1, {"strategy": "ddp", "devices": 2}, "wants 2 .*wait for ranks that nobody starts"),
    ("pytorch", 2, 4, {"strategy": "ddp", "devices": 8, "num_nodes": 2}, "wants 16 .*wait for ranks"),
    ("pytorch", 2, 4, {"strategy": "ddp", "devices": 8, "num_nodes": 1}, "num_nodes=1 x devices=8.*2 node.s. x 4"),
    ("mpi", 2, 2, {"strategy": "ddp", "devices": 2, "num_nodes": 2}, "AzureMLEnvironment"),
    ("mpi", 2, 1, {"strategy": "ddp", "devices": 2, "num_nodes": 2}, "NODE_RANK is not set.*AzureMLEnvironment"),
    ("mpi", 1, 2, {}, "with SingleDeviceStrategy.*train alone"),
    ("tensorflow", 2, 1, {"strategy": "ddp", "devices": 1, "num_nodes": 2}, "AzureMLEnvironment"),
]


@pytest.mark.parametrize(("launcher", "nodes", "processes", "arguments", "message"), WRONG)
def test_another_size_or_other_ranks_stop(
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
    nodes: int,
    processes: int,
    arguments: dict[str, Any],
    message: str,
) -> None:
    inside(monkeypatch, launcher, nodes, processes, nodes * processes - 1)
    trainer = Trainer(**{"devices": "auto", **arguments}, **QUIET)
    with pytest.raises(LaunchError, match=message) as error:
        guard_of(trainer).check(trainer)
    assert "azureml_ddp" in str(error.value)


def test_a_node_rank_that_lightning_cannot_read_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    inside(monkeypatch, "pytorch", 2, 1, 1)
    monkeypatch.delenv("NODE_RANK")
    trainer = Trainer(strategy="ddp", devices=1, num_nodes=2, **QUIET)
    with pytest.raises(LaunchError, match=r"reads node rank 0 .*NODE_RANK is not set.*gave this process node rank 1"):
        guard_of(trainer).check(trainer)


def test_the_plugin_by_hand_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    inside(monkeypatch, "mpi", 2, 2, 3)
    trainer = Trainer(strategy="ddp", devices=2, num_nodes=2, plugins=[AzureMLEnvironment()], **QUIET)
    guard_of(trainer).check(trainer)


def test_a_process_that_lightning_started_on_one_node_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    inside(monkeypatch, "mpi", 1, 1, 0)
    written = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711", "NODE_RANK": "0", "LOCAL_RANK": "1"}
    for name, value in written.items():
        monkeypatch.setenv(name, value)
    trainer = Trainer(strategy="ddp", devices=2, **QUIET)
    guard_of(trainer).check(trainer)


@pytest.mark.slow
def test_stock_lightning_may_start_the_processes_of_one_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`distribution: {type: mpi}` with its process count left out: mpirun starts one, Lightning the other."""
    inside(monkeypatch, "mpi", 1, 1, 0)
    script = tmp_path / "train.py"
    script.write_text(
        "from lightning.pytorch import Trainer\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        f"trainer = Trainer(strategy='ddp', devices=2, max_steps=1, **{QUIET!r})\n"
        "trainer.fit(BoringModel())\n"
        "print(f'rank {trainer.global_rank} of {trainer.world_size} ended')\n"
    )
    done = run_forked([str(script)], os.environ, timeout=250)
    assert done.returncode == 0, done.stdout
    assert all(f"rank {rank} of 2 ended" in done.stdout for rank in (0, 1)), done.stdout


def test_fit_stops_before_the_first_hook_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(BoringModel):
        def setup(self, stage: str) -> None:
            raise AssertionError("the guard came too late")

    inside(monkeypatch, "pytorch", 2, 1, 0)
    with pytest.raises(LaunchError, match="train alone"):
        Trainer(devices=1, max_steps=1, **QUIET).fit(Model())


LIMITS: dict[str, Any] = {"limit_val_batches": 1, "limit_test_batches": 1, "limit_predict_batches": 1}


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_one_rank_may_evaluate_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, entry: str
) -> None:
    """Lightning advises `Trainer(devices=1, num_nodes=1)` after a distributed fit."""
    warned = {}
    for rank in (0, 1):
        inside(monkeypatch, "pytorch", 2, 1, rank)
        trainer = Trainer(devices=1, num_nodes=1, **LIMITS, **QUIET)
        caplog.clear()
        for _ in range(2):
            getattr(trainer, entry)(BoringModel())
        warned[rank] = [each.getMessage() for each in caplog.records if each.name == "azureml_strategy.cluster.guard"]
    assert warned[0] == []
    (said,) = warned[1]
    assert f"Rank 1 runs `{entry}`" in said
    assert "if trainer.is_global_zero:" in said


def test_evaluation_by_ranks_that_do_not_know_one_another_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler for one of one ranks, asked for by rank 1; and barriers, if a process group is left."""
    inside(monkeypatch, "pytorch", 2, 1, 1)
    with pytest.raises(LaunchError, match=f"with DDPStrategy.*{GUARD_SWITCH}=off"):
        Trainer(strategy="ddp", devices=1, **LIMITS, **QUIET).test(BoringModel())


def test_the_check_is_repeated_at_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    inside(monkeypatch, "pytorch", 2, 1, 0)
    trainer = Trainer(devices=1, **QUIET)
    with pytest.raises(LaunchError, match="train alone"):
        guard_of(trainer).setup(trainer, BoringModel(), "fit")


@pytest.mark.parametrize("rank", [0, 1])
def test_switched_off_a_trainer_may_run_alone(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    inside(monkeypatch, "pytorch", 2, 1, rank)
    monkeypatch.setenv(GUARD_SWITCH, "off")
    trainer = Trainer(devices=1, max_steps=1, limit_val_batches=0, **QUIET)
    trainer.fit(BoringModel())
    assert (trainer.world_size, trainer.global_step) == (1, 1)
