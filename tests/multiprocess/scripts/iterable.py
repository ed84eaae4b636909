"""Trainings on data that each rank has alone, or all of them together: which of them is warned of."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from tests.multiprocess.scripts.common import Regression, loader, quiet_trainer, report
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset


@dataclass
class Item:
    rows: Tensor
    words: list[str]
    array: Any


class Rows(IterableDataset[Any]):
    """Rows from one seed: all of them on every rank, or those of its own; nested in containers or not."""

    def __init__(self, split: bool = False, batches: tuple[int, int] = (6, 6), nested: str = "", equal: bool = False):
        self.split, self.batches, self.nested, self.equal = split, batches, nested, equal

    def __iter__(self) -> Iterator[Any]:
        rank = int(os.environ["RANK"])
        generator = torch.Generator().manual_seed(rank if self.split else 0)
        for number in range(8 * self.batches[rank]):
            if self.equal:
                generator.manual_seed(0)
                number = 0
            row = torch.randn(8, generator=generator)
            if self.nested == "words":  # all that differs between the ranks, where they are split, is a word
                yield {"deep": [(Item(torch.ones(8), [str(float(row[0]))], np.zeros(2)),)], "none": None}
            else:
                yield row, torch.tensor(number)


class AnyBatch(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((torch.ones(8, 8), torch.arange(8)), batch_idx)


def fit(model: Regression, data: Any, **arguments: Any) -> Trainer:
    strategy = arguments.pop("strategy", "azureml_ddp")
    trainer = quiet_trainer(strategy=strategy, use_distributed_sampler=False, **arguments)
    trainer.fit(model, data)
    return trainer


def unbatched(dataset: Rows) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=None)


def main() -> None:
    lines: list[str] = []
    logger = logging.getLogger("azureml_strategy")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    found: dict[str, list[str]] = {}

    def case(name: str, model: Regression, data: Any, **arguments: Any) -> int:
        trainer = fit(model, data, **arguments)
        found[name], lines[:] = lines[:], []
        return trainer.global_rank

    case("same", Regression(), DataLoader(Rows(), 8))
    case("stock strategy", Regression(), DataLoader(Rows(), 8), strategy=DDPStrategy(), num_nodes=2)
    case("split", Regression(), DataLoader(Rows(split=True), 8))
    case("one batch", Regression(), DataLoader(Rows(batches=(1, 1)), 8))
    case("one on this rank, more on that", AnyBatch(), DataLoader(Rows(batches=(1, 3)), 8), max_steps=1)
    case("the same batch again", Regression(), DataLoader(Rows(equal=True), 8))
    case("overfit", Regression(), DataLoader(Rows(), 8), overfit_batches=2)
    case("nested, same", AnyBatch(), unbatched(Rows(nested="words")))
    case("nested, split", AnyBatch(), unbatched(Rows(nested="words", split=True)))
    case("map-style, nobody splits", Regression(), loader())
    rank = case("map-style, all of it twice", Regression(), loader(), max_steps=3)
    report(rank, **{name: [line for line in each if "train on the same" in line] for name, each in found.items()})


if __name__ == "__main__":
    main()
