"""AzureMLDeepSpeedStrategy before a process group; tests/multiprocess/test_zero.py trains with it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from tests.strategies.conftest import EnterJob
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.strategies import AzureMLDeepSpeedStrategy
from azureml_strategy.strategies.launcher import NodeLauncher
from azureml_strategy.strategies.zero.device import AnyDeviceDeepSpeedStrategy


class Linear(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(strategy: Any, **arguments: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", strategy=strategy, max_steps=1, **quiet, **arguments)


@pytest.mark.parametrize(
    ("name", "stage", "offload"),
    [
        ("azureml_deepspeed", 2, False),
        ("azureml_deepspeed_stage_1", 1, False),
        ("azureml_deepspeed_stage_2", 2, False),
        ("azureml_deepspeed_stage_3", 3, False),
        ("azureml_deepspeed_stage_3_offload", 3, True),
    ],
)
def test_names(name: str, stage: int, offload: bool) -> None:
    strategy = trainer(name).strategy
    assert isinstance(strategy, AzureMLDeepSpeedStrategy)
    zero = strategy.config["zero_optimization"]
    assert (zero["stage"], "offload_optimizer" in zero, "offload_param" in zero) == (stage, offload, offload)
    assert strategy.root_device == torch.device("cpu", 0)


def test_a_name_with_an_unknown_stage() -> None:
    with pytest.raises(ValueError, match="strategy='azureml_deepspeed_stage_4'"):
        trainer("azureml_deepspeed_stage_4")


def test_ranks_that_share_matrices_read_the_same_samples(enter_job: EnterJob) -> None:
    enter_job(2, 4)
    strategy = AzureMLDeepSpeedStrategy(tensor_parallel_size=4)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 1}
    assert AzureMLDeepSpeedStrategy().distributed_sampler_kwargs == {"num_replicas": 8, "rank": 7}


def test_the_job_decides_nodes_and_our_launcher_starts_processes(enter_job: EnterJob) -> None:
    enter_job(2, 1)
    strategy = AzureMLDeepSpeedStrategy()
    with pytest.raises(LaunchError, match="num_nodes=3"):
        strategy.num_nodes = 3
    strategy.num_nodes, strategy.parallel_devices = 1, [torch.device("cpu")] * 3
    strategy._configure_launcher()
    assert isinstance(strategy.launcher, NodeLauncher)
    assert (strategy.launcher.num_processes, strategy.launcher.num_nodes) == (3, 2)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group ends with the test, and so do the variables that Lightning sets for it."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    yield
    torch.distributed.destroy_process_group()


def batches(size: int | None) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=size)


@pytest.mark.usefixtures("group")
def test_a_second_run_in_the_process() -> None:
    trainer("azureml_deepspeed", devices=1).fit(Linear(), batches(4))
    torch.distributed.destroy_process_group()
    again = trainer("azureml_deepspeed_stage_3", devices=1)
    again.fit(Linear(), batches(None))
    assert again.global_step == 1


@pytest.mark.usefixtures("group")
def test_a_file_that_contradicts_the_trainer_ends_before_training(tmp_path: Path) -> None:
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 1}}))
    with pytest.raises(ValueError, match="train_micro_batch_size_per_gpu=16, but 4 comes from a data loader"):
        trainer(AzureMLDeepSpeedStrategy(config=str(file)), devices=1).fit(Linear(), batches(4))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("config", [None, {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}])
def test_the_log_counts_the_samples_that_it_is_told(config: dict[str, Any] | None) -> None:
    """The loader says 4; stock Lightning takes any other number as well, but not beside a configuration."""
    strategy = AzureMLDeepSpeedStrategy(config=config, logging_batch_size_per_gpu=16)
    run = trainer(strategy, devices=1)
    run.fit(Linear(), batches(4))
    assert run.global_step == 1
    assert strategy.deepspeed_engine.train_micro_batch_size_per_gpu() == 16


@pytest.mark.parametrize(("accumulated", "whole"), [(1, ""), (2, "limit_train_batches=2"), (3, ""), (4, "a smaller")])
@pytest.mark.usefixtures("group")
def test_batches_that_fill_no_step_are_named_at_the_start(accumulated: int, whole: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(TensorDataset(torch.ones(3, 2)))
        trainer(AzureMLDeepSpeedStrategy(), devices=1, accumulate_grad_batches=accumulated, max_epochs=1).fit(
            Linear(), loader
        )
    said = [str(each.message) for each in caught if "do not fill a step" in str(each.message)]
    assert len(said) == bool(whole)
    assert all(whole in each for each in said)


@pytest.mark.usefixtures("group")
def test_a_folder_that_is_saved_to_again_keeps_nothing_of_more_processes(tmp_path: Path) -> None:
    saved = tmp_path / "last.ckpt"
    run = trainer("azureml_deepspeed", devices=1)
    run.fit(Linear(), batches(4))
    run.save_checkpoint(saved)
    (shard,) = (saved / "checkpoint").glob("*_optim_states.pt")
    shard.with_name(shard.name.replace("rank_0", "rank_1", 1)).write_text("of another step")
    (saved / "latest_universal").write_text("of another step")
    run.save_checkpoint(saved)
    assert list((saved / "checkpoint").glob("*_optim_states.pt")) == [shard]
    assert not (saved / "latest_universal").exists()


def test_processes_that_see_a_gpu_each_end_before_training(
    monkeypatch: pytest.MonkeyPatch, enter_job: EnterJob
) -> None:
    enter_job(1, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    strategy = AzureMLDeepSpeedStrategy()
    strategy.parallel_devices = [torch.device("cuda", 0)] * 2
    with pytest.raises(RuntimeError, match=r"2 processes of a node sees one GPU only \(CUDA_VISIBLE_DEVICES=3\)"):
        AnyDeviceDeepSpeedStrategy.setup_environment(strategy)
