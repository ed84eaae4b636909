"""What local SGD refuses before a training starts, and its schedules."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder, ModelPruning, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from azureml_strategy.strategies import AzureMLDDPStrategy
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.local_sgd import AzureMLLocalSGDStrategy, GrowingPeriod, QuadraticPeriod, refusals
from azureml_strategy.strategies.local_sgd.fragments import cut, statistics, trainable


class Module(LightningModule):
    def __init__(self, manual: bool = False, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.optimizer = optimizer
        self.automatic_optimization = not manual

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=0.01)


def fit(module: LightningModule, strategy: Any = "azureml_local_sgd", **arguments: Any) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, **{"max_epochs": 1, **quiet, **arguments})
    environ = dict(os.environ)
    try:
        trainer.fit(module, DataLoader(torch.randn(32, 4), batch_size=1))
    finally:
        torch.distributed.destroy_process_group()
        os.environ.clear()  # Lightning's variables of this process
        os.environ.update(environ)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"period": 0}, "period=0: no step at all"),
        ({"fragments": 0}, "fragments=0"),
        ({"period": 4, "fragments": 5}, r"period of 4 step\(s\) has no room for 5 fragments"),
        ({"period": 8, "delay": 9}, r"delay=9, but a fragment comes every 8 step\(s\)"),
        ({"delay": -1}, "delay=-1"),
        ({"compression": "int4"}, "compression='int4'. Give 'bf16' or 'int8'"),
        ({"mixing": 1.5}, "mixing=1.5. Give 0 to 1"),
        ({"outer_learning_rate": -0.7}, "outer_learning_rate=-0.7"),
        ({"outer_learning_rate": 0}, "outer_learning_rate=0. Give more than 0"),
        ({"outer_learning_rate": 0.0}, "outer_learning_rate=0.0. Give more than 0"),
        ({"outer_learning_rate": float("nan")}, "outer_learning_rate=nan. Give more than 0"),
        ({"tune": True}, "tune chooses how DDP sends gradients"),
        ({"tuned": "tuned.json"}, "tuned chooses how DDP sends gradients"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0"),
        ({"replica": "gpu"}, "replica='gpu' is unknown"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        AzureMLLocalSGDStrategy(**arguments)


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        (Module(manual=True), {}, "optimizes manually"),
        (Module(), {"callbacks": [StochasticWeightAveraging(1e-2)]}, "StochasticWeightAveraging averages over"),
        (Module(), {"callbacks": [WeightAveraging()]}, "WeightAveraging averages over"),
        (
            Module(),
            {"callbacks": [ModelPruning("l1_unstructured")]},
            "ModelPruning prunes by the weights",
        ),
        (Module(optimizer=torch.optim.LBFGS), {}, "LBFGS learns the curvature"),
        (Module(), {"sync_batchnorm": True}, r"sync_batchnorm=True\) has all ranks wait"),
        (Module(), {"max_steps": 15}, "has 15 optimizer steps, 0 of warm-up, and then a period of 16"),
        (Module(), {"strategy": AzureMLLocalSGDStrategy(replica="node")}, "one node, so that there is nothing"),
    ],
)
def test_what_does_not_go_together(module: LightningModule, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        fit(module, **arguments)


@pytest.mark.parametrize(
    ("period", "warmup_steps", "length"),
    [
        (33, 0, 33),
        (GrowingPeriod(first=33), 0, 33),
        (QuadraticPeriod(alpha=0.06), 0, 36),
        (lambda step, learning_rate: 33, 0, 33),
        (12, 24, 12),
        (GrowingPeriod(first=12), 24, 12),
        (QuadraticPeriod(alpha=0.06), 24, 36),
        (lambda step, learning_rate: 9, 24, 9),
    ],
)
def test_a_first_period_longer_than_the_run(period: Any, warmup_steps: int, length: int) -> None:
    """The run has 32 steps, and a learning rate of 0.01."""
    strategy = AzureMLLocalSGDStrategy(period=period, warmup_steps=warmup_steps)
    words = f"has 32 optimizer steps, {warmup_steps} of warm-up, and then a period of {length}:"
    with pytest.raises(ConfigurationError, match=words):
        fit(Module(), strategy)


@pytest.mark.parametrize(
    ("period", "warmup_steps", "trainer"),
    [
        (32, 0, {}),
        (lambda step, learning_rate: 8, 24, {}),
        (lambda step, learning_rate: 16 if step == 0 else 99, 0, {}),
        (33, 32, {}),
        (GrowingPeriod(first=33), 500, {}),
        (QuadraticPeriod(alpha=0.06), 0, {"fast_dev_run": 3}),
    ],
)
def test_a_first_period_that_ends_in_the_run_or_has_no_place_in_it(
    period: Any, warmup_steps: int, trainer: dict[str, Any]
) -> None:
    fit(Module(), AzureMLLocalSGDStrategy(period=period, warmup_steps=warmup_steps), **trainer)


@pytest.mark.parametrize("period", [30, QuadraticPeriod(alpha=0.05)])
def test_a_search_for_a_learning_rate_is_shorter_than_a_period(tmp_path: Path, period: Any) -> None:
    finder = LearningRateFinder(num_training_steps=20, early_stop_threshold=None, update_attr=False)
    fit(Module(), AzureMLLocalSGDStrategy(period=period), callbacks=[finder], default_root_dir=tmp_path)
    assert len(finder.optimal_lr.results["lr"]) == 20
    assert list(tmp_path.iterdir()) == [], "what the search had saved is gone"


class Search(LearningRateFinder):
    """A search for the learning rate before an epoch; before the first one, it is Lightning's own."""

    def __init__(self, epoch: int) -> None:
        super().__init__(num_training_steps=20, early_stop_threshold=None, update_attr=False)
        self.epoch = epoch

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.epoch == 0:
            self.lr_find(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.epoch == trainer.current_epoch > 0:
            self.lr_find(trainer, pl_module)


@pytest.mark.parametrize(
    ("epoch", "periods"),
    [(0, [0, 8, 16, *range(0, 97, 8)]), (1, [0, 8, 16, 24, 32, 40, 48, *range(40, 97, 8)])],
)
def test_a_search_for_a_learning_rate_leaves_the_periods_alone(tmp_path: Path, epoch: int, periods: list[int]) -> None:
    """Steps in which a period begins: those of the search, of 20 steps, and of the run, of 96, which has its own."""
    begun = []

    def schedule(step: int, learning_rate: float) -> int:
        begun.append(step)
        return 8

    strategy = AzureMLLocalSGDStrategy(period=schedule, outer_learning_rate=0.7)
    fit(Module(), strategy, callbacks=[Search(epoch)], max_epochs=3, default_root_dir=tmp_path)
    assert begun == periods


def test_infiniband_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adapter:
        name, usable = "mlx5_ib0", True

    monkeypatch.setattr(refusals, "read_hcas", lambda: (Adapter(),))
    refusals.refuse_infiniband(num_nodes=1)
    with pytest.raises(ConfigurationError, match=r"have InfiniBand \(mlx5_ib0\).*allow_infiniband=True"):
        refusals.refuse_infiniband(num_nodes=2)


@pytest.mark.parametrize(
    ("version", "given", "words"),
    [
        ((2, 25, 1), "1", r"needs NCCL 2.26 or newer, and this is 2.25.1.*process_group_backend='gloo'"),
        ((2, 27, 3), "0", r"NCCL_LAUNCH_ORDER_IMPLICIT=0. Set the variable to 1"),
        ((2, 27, 3), None, "an earlier training of this process has started NCCL without it. Set the variable to 1"),
        ((2, 26, 2), "1", None),
    ],
)
def test_delayed_exchanges_need_one_order_of_all_groups(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], given: str | None, words: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {} if given is None else {refusals.ONE_ORDER: given})
    if words is None:
        refusals.refuse_unordered_nccl(version)
        return
    with pytest.raises(ConfigurationError, match=words):
        refusals.refuse_unordered_nccl(version)


@pytest.mark.parametrize(("delay", "backend", "expected"), [(2, "nccl", "1"), (0, "nccl", None), (2, "gloo", None)])
def test_nccl_is_told_to_keep_the_order(
    monkeypatch: pytest.MonkeyPatch, delay: int, backend: str, expected: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(AzureMLDDPStrategy, "setup_environment", lambda strategy: None)
    monkeypatch.setattr(AzureMLLocalSGDStrategy, "world_size", 2)
    strategy = AzureMLLocalSGDStrategy(period=4, delay=delay, process_group_backend=backend)
    strategy.parallel_devices = [torch.device("cpu")] * 2
    monkeypatch.setattr(strategy, "set_world_ranks", lambda: None)
    monkeypatch.setattr(AzureMLLocalSGDStrategy, "root_device", torch.device("cuda", 0))
    strategy.setup_environment()
    assert os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == expected


def test_periods() -> None:
    growing = GrowingPeriod(first=1, factor=2, every=10, most=6)
    assert [growing(step, 0.1) for step in (0, 9, 10, 20, 30, 10**9)] == [1, 1, 2, 4, 6, 6]
    quadratic = QuadraticPeriod(alpha=0.2, least=4, most=64)
    assert [quadratic(0, rate) for rate in (0.1, 0.05, 0.025, 1e-9, 0.0)] == [4, 16, 64, 64, 64]
    for wrong in ({"first": 0}, {"factor": 1.0}, {"first": 8, "most": 4}):
        with pytest.raises(ConfigurationError):
            GrowingPeriod(**wrong)
    with pytest.raises(ConfigurationError):
        QuadraticPeriod(alpha=0)


@pytest.mark.parametrize("parts", [1, 3, 50])
def test_parts_hold_every_element_once(parts: int) -> None:
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    module = nn.Sequential(nn.Linear(5, 7), convolution, nn.BatchNorm2d(4))
    tensors = trainable(module) | statistics(module)
    assert len(tensors) == 8
    fragments = cut(tensors, parts)
    assert len(fragments) == parts
    assert sum(each.size for each in fragments) == sum(each.numel() for each in tensors.values())
    before = {name: each.detach().clone() for name, each in tensors.items()}
    for each in fragments:
        each.write(each.read(tensors) + 1, tensors)
    for name, each in tensors.items():
        torch.testing.assert_close(each.detach(), before[name] + 1)


def test_numbers_that_cannot_be_averaged_are_refused() -> None:
    module = nn.Module()
    module.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(ConfigurationError, match=r"phase is torch.complex64"):
        trainable(module)
