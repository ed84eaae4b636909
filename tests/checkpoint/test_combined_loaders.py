"""Several loaders of unequal length, resumed after each step: the batches are those of a training without a stop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.checkpoint.folder import CheckpointFolder
from azureml_strategy.data import ResumableLoader, ResumableSampler

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

_EPOCHS = 2
Read = list[Any]


class Reads(LightningModule):
    """Notes the batches that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.read: Read = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.read.append((self.current_epoch, batch_idx, plain(batch)))
        return self.weight**2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stream(IterableDataset[Tensor]):
    """A stream without a length that knows its place."""

    def __init__(self, batches: int) -> None:
        self.batches, self.at = batches, 0

    def __iter__(self) -> Iterator[Tensor]:
        begin, self.at = self.at, 0
        for number in range(begin, self.batches):
            self.at = number + 1
            yield torch.tensor([self.batches, number])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def plain(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {name: plain(each) for name, each in batch.items()}
    return [plain(each) for each in batch] if isinstance(batch, (list, tuple)) else batch


def resumable(batches: int, workers: int = 0, persistent: bool = False, **options: Any) -> ResumableLoader:
    """Batches of two samples; of one replica, or what the second of two reads."""
    replicas, left_out = options.get("replicas", 1), options.get("left_out", 0)
    rows = TensorDataset(torch.arange(2 * replicas * batches - left_out) + 100 * batches)
    return ResumableLoader(
        rows,
        sampler=ResumableSampler(rows, replicas, replicas - 1, seed=7),
        batch_size=2,
        num_workers=workers,
        persistent_workers=persistent,
        drop_last=not left_out,
    )


def shuffled(batches: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(2 * batches) + 100 * batches), batch_size=2, shuffle=True)


def fit(folder: Path, loaders: Any, every: int, resume: Path | None = None) -> Read:
    """Train for two epochs, or go on; the batches that were read."""
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=_EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[JobCheckpoint(folder, keep_last=100, asynchronous=False, every_n_train_steps=every)],
    )
    module = Reads()
    trainer.fit(module, loaders, ckpt_path=resume)
    return module.read


def resumed_otherwise(folder: Path, make: Callable[[], Any]) -> dict[int, Any]:
    """The steps of the first epoch after which a resume reads other batches than without, and the first such batch."""
    whole = fit(folder / "whole", make(), every=1)
    found = {}
    for each in CheckpointFolder(folder / "whole").complete():
        if each.step <= len(whole) // _EPOCHS:
            rest = fit(folder / f"from {each.step}", make(), 1000, folder / "whole" / each.name)
            pairs = itertools.zip_longest(rest, whole[each.step :])
            if differing := [pair for pair in pairs if pair[0] != pair[1]]:
                found[each.step] = differing[0]
    return found


@pytest.fixture(autouse=True)
def _seeded(seeded: None) -> None:
    """What seed_everything writes goes away again."""


CASES: dict[str, Callable[[], Any]] = {
    "a dictionary": lambda: {"short": resumable(2), "long": resumable(5)},
    "a nested one": lambda: {"images": [resumable(4), resumable(1)], "text": resumable(3)},
    "the share of a rank": lambda: [resumable(4, replicas=2), resumable(2, replicas=2)],
    "with a last batch that is not full": lambda: {"short": resumable(2, left_out=1), "long": resumable(4, left_out=1)},
    "with one that is read again": lambda: {"short": resumable(2), "long": shuffled(4)},
    "with a short one that is read again": lambda: {"short": shuffled(2), "long": resumable(4)},
    "streams": lambda: {"short": Stream(3), "long": Stream(5)},
    "a stream beside a loader": lambda: [Stream(5), resumable(3)],
    "of one length": lambda: [Stream(2), resumable(2)],
}


@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size"])
@pytest.mark.parametrize("case", CASES)
def test_loaders_of_unequal_length(tmp_path: Path, case: str, mode: Any) -> None:
    assert resumed_otherwise(tmp_path, lambda: CombinedLoader(CASES[case](), mode)) == {}


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes(tmp_path: Path, persistent: bool) -> None:
    """The longer loader ends one step after the shorter one."""
    assert resumed_otherwise(tmp_path, lambda: [resumable(1, 1, persistent), resumable(2, 1, persistent)]) == {}
