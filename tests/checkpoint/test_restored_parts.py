"""A resumed training with other optimizers, schedulers or callbacks than its checkpoint has says what is left out."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from tests.checkpoint.saving import QUICK, QUIET
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LRScheduler, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader
from typing_extensions import override

from azureml_strategy.checkpoint.serialization import PlainDataStrategy

SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "steps": lambda optimizer: StepLR(optimizer, 3),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 5),
    "decay": lambda optimizer: ExponentialLR(optimizer, 0.9),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer),
}
SAID = re.compile(r"The checkpoint has|callbacks used to create")


class Plain(PlainDataStrategy, SingleDeviceStrategy):
    """What each of our strategies does with a checkpoint, on one device."""


class Layers(LightningModule):
    def __init__(self, optimizers: int, schedulers: Sequence[str] = ()) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
        self._made, self._schedulers = optimizers, schedulers

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers(use_pl_optimizer=False)
        given = optimizers if isinstance(optimizers, list) else [optimizers]
        sum(layer(batch).sum() for layer in self.layers).backward()
        for each in given:
            each.step()

    def configure_optimizers(self) -> Any:
        optimizers = [SGD(layer.parameters(), 0.1, momentum=0.9) for layer in list(self.layers)[: self._made]]
        return optimizers, [SCHEDULERS[name](optimizers[0]) for name in self._schedulers]


class Counts(Callback):
    def __init__(self) -> None:
        self.batches = 0

    @override
    def on_train_batch_end(self, *arguments: Any) -> None:
        self.batches += 1

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


def fit(module: LightningModule, resume: Path | None = None, *callbacks: Callback) -> tuple[Trainer, list[str]]:
    """Train an epoch more, and return the warnings of what is left out."""
    given = {**QUICK, **QUIET, "max_epochs": 1 if resume is None else 2, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", strategy=Plain("cpu"), callbacks=list(callbacks), **given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(torch.ones(2, 1)), ckpt_path=resume)
    return trainer, [str(each.message) for each in caught if SAID.search(str(each.message))]


def resumed(folder: Path, saved: Layers, now: Layers) -> list[str]:
    fit(saved)[0].save_checkpoint(folder / "a.ckpt")
    return fit(now, folder / "a.ckpt")[1]


@pytest.mark.parametrize(("saved", "now"), itertools.product((1, 2, 3), repeat=2))
def test_another_number_of_optimizers(tmp_path: Path, saved: int, now: int) -> None:
    texts = resumed(tmp_path, Layers(saved), Layers(now))
    what = rf"has {saved} optimizers, and the training has {now}: the .*" + (
        rf"last {saved - now} are left out" if saved > now else r"last begin anew \(SGD"
    )
    assert len(texts) == (saved != now)
    assert all(re.search(what, text) for text in texts), texts


@pytest.mark.parametrize(("saved", "now"), itertools.product([(), ("steps",), ("steps", "decay")], repeat=2))
def test_another_number_of_schedulers(tmp_path: Path, saved: tuple[str, ...], now: tuple[str, ...]) -> None:
    texts = resumed(tmp_path, Layers(1, saved), Layers(1, now))
    assert len(texts) == (len(saved) != len(now))
    words = f"has {len(saved)} schedulers of learning rates, and the training has {len(now)}"
    assert all(words in text for text in texts), texts


@pytest.mark.parametrize(("saved", "now"), itertools.product(SCHEDULERS, repeat=2))
def test_a_scheduler_of_another_class(tmp_path: Path, saved: str, now: str) -> None:
    texts = resumed(tmp_path, Layers(1, [saved]), Layers(1, [now]))
    # StepLR reads all that ExponentialLR has kept.
    assert len(texts) == (saved != now and (saved, now) != ("decay", "steps"))
    assert all(re.search(r"a scheduler of learning rates with .*, which \w+ does not read", each) for each in texts)


def test_a_callback_that_is_gone_is_named_and_a_new_one_begins(tmp_path: Path) -> None:
    first = Counts()
    fit(Layers(1), None, first)[0].save_checkpoint(tmp_path / "a.ckpt")
    (text,) = fit(Layers(1), tmp_path / "a.ckpt")[1]
    assert "Counts" in text
    texts = fit(Layers(1), tmp_path / "a.ckpt", again := Counts())[1]
    assert (texts, again.batches) == ([], 4)
    fit(Layers(1))[0].save_checkpoint(tmp_path / "b.ckpt")
    assert fit(Layers(1), tmp_path / "b.ckpt", Counts())[1] == []
