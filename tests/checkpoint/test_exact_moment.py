"""Whatever a training does to its tensors after a checkpoint was taken: the file holds what they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.checkpoint.folder import CheckpointFolder

# Later than the first checkpoints of a fit, of each kind.
_FROM_STEP = 6


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # what seed_everything writes goes away again
        monkeypatch.setenv(name, "0")


class Wide(LightningModule):
    """Tensors of 256 KiB and of a few bytes, and moments of both.

    Args:
        write: changes tensors of the training in the middle of a step.
    """

    def __init__(self, write: Callable[[Wide], None] | None = None) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.BatchNorm1d(256), nn.Linear(256, 1))
        self.write = write

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.write is not None and self.trainer.global_step >= _FROM_STEP:
            self.write(self)
        return nn.functional.mse_loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", nn.functional.mse_loss(self.network(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def large(self) -> list[nn.Parameter]:
        return [each for each in self.parameters() if each.nbytes >= 1 << 16]


class FlatBuffer(Callback):
    """Lays all parameters into one buffer, as fused optimizers do."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parameters = list(pl_module.parameters())
        pl_module.flat = torch.cat([each.detach().flatten() for each in parameters])
        pieces = pl_module.flat.split([each.numel() for each in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.data = piece.view(parameter.shape)


def through_data(module: Wide) -> None:
    for each in module.large():
        each.data.mul_(1.01)


def through_numpy(module: Wide) -> None:
    for each in module.large():
        view = each.detach().numpy()
        view += 0.01


def through_the_flat_buffer(module: Wide) -> None:
    assert isinstance(module.flat, Tensor)
    module.flat.mul_(1.01)


def through_the_optimizer(module: Wide) -> None:
    optimizer = module.optimizers(use_pl_optimizer=False)
    assert isinstance(optimizer, torch.optim.Optimizer)
    for each in module.large():
        optimizer.state[each]["exp_avg"].data.mul_(0.5)


WRITES: dict[str, tuple[Callable[[Wide], None], list[Callback]]] = {
    "parameter.data": (through_data, []),
    "a numpy view": (through_numpy, []),
    "a flat buffer": (through_the_flat_buffer, [FlatBuffer()]),
    "exp_avg.data": (through_the_optimizer, []),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_that_nobody_counts(tmp_path: Path, write: str) -> None:
    change, callbacks = WRITES[write]
    expected = train(tmp_path / "waits", False, lambda: Wide(change), *callbacks)
    found = train(tmp_path / "thread", True, lambda: Wide(change), *callbacks)
    assert differences(found, expected) == []


@pytest.mark.parametrize("by", ["interval", "epoch", "validation"])
def test_lightnings_average_of_the_weights(tmp_path: Path, by: str) -> None:
    """At the end of a fit it writes the average into the parameters, right after the last checkpoint."""
    expected = train(tmp_path / "waits", False, Wide, EMAWeightAveraging(decay=0.9), by=by)
    found = train(tmp_path / "thread", True, Wide, EMAWeightAveraging(decay=0.9), by=by)
    assert differences(found, expected) == []


def train(
    folder: Path, asynchronous: bool, module: Callable[[], LightningModule], *callbacks: Callback, by: str = "interval"
) -> dict[int, Any]:
    """Train for two epochs of five steps; all checkpoints, by their step."""
    seed_everything(1, verbose=False)
    rows = torch.randn(40, 256, generator=torch.Generator().manual_seed(2))
    data = DataLoader(TensorDataset(rows, rows.sum(dim=1, keepdim=True)), batch_size=8)
    every = {"every_n_train_steps": 1} if by == "interval" else {}
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        limit_val_batches=2 if by == "validation" else 0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[JobCheckpoint(folder, keep_last=20, asynchronous=asynchronous, **every), *callbacks],
    )
    trainer.fit(module(), data, data)
    complete = CheckpointFolder(folder).complete()
    assert len(complete) == (10 if by == "interval" else 2)
    return {each.step: torch.load(folder / each.name, weights_only=False) for each in complete}


def differences(found: dict[int, Any], expected: dict[int, Any]) -> list[str]:
    """Where two sets of checkpoints differ, by the keys that lead there."""
    one, other = dict(_leaves(found)), dict(_leaves(expected))
    assert one.keys() == other.keys()
    assert sum(isinstance(each, Tensor) and each.nbytes >= 1 << 16 for each in one.values()) >= 6
    return [where for where, value in one.items() if not _equal(value, other[where])]


def _leaves(content: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(content, (dict, list, tuple)):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from _leaves(value, f"{where}/{key}")
    else:
        yield where, content


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)
