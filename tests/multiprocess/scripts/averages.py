"""What ranks with unequal numbers of samples and labels average: reductions, logs, gradients and evaluations.

The test runs `logged` and `learned` in one process of stock Lightning too, for the numbers that all must give.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from common import quiet_trainer, report
from lightning.fabric import Fabric
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from tests.multiprocess.scripts.strategies import BUCKETS
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from azureml_strategy.cluster.data_parallel import data_parallel_size
from azureml_strategy.models import FineTuner, GPTConfig, ImageClassifier, LanguageModel, fine_tuning_loss

IGNORED, CLASSES = -100, 8
TYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
OPERATIONS: dict[str, Any] = {
    **{name: name for name in ("mean", "avg", "sum", "min", "max")},
    "ReduceOp.SUM": ReduceOp.SUM,
    "ReduceOp.AVG": ReduceOp.AVG,
}


def given(name: str, place: int) -> Tensor:
    """What the rank at a place gives: numbers whose sum leaves a type of 8 bits, or float16's range."""
    dtype = getattr(torch, name)
    most = {"bool": 1, "int8": 120, "uint8": 200, "float16": 60000}.get(name, 2**20)
    numbers = torch.tensor([place % 2, 3 + place, most], dtype=torch.float64)
    return numbers.to(dtype) if not dtype.is_floating_point else (numbers / 3).to(dtype)


def reductions(reduce: Any, place: int) -> dict[str, Any]:
    """The result of each operation on each type."""
    results = {}
    for name in TYPES:
        for operation, op in OPERATIONS.items():
            result = reduce(given(name, place), reduce_op=op)
            results[f"{name} {operation}"] = [str(result.dtype), result.double().tolist()]
    return results


@dataclass(frozen=True)
class Layer:
    """One layer of a chain."""

    name: str
    build: Any
    kind: str = "layer"
    tied: None = None
    tied_parameter: str = "weight"


class Logging(LightningModule):
    """Logs the numbers of its rows in each way that reduces them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(1, 2), nn.Linear(2, 1)
        self.reduced: dict[str, Any] = {}

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(self.first(rows))

    def pipeline_layers(self) -> list[Layer]:
        return [Layer(name, partial(self.get_submodule, name)) for name in ("first", "second")]

    def pipeline_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch[0], batch[0]

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"first": "colwise", "second": "rowwise"}

    def on_train_start(self) -> None:
        strategy, sampler = self.trainer.strategy, self.trainer.distributed_sampler_kwargs
        alike = getattr(strategy, "alike", 1)
        place = sampler["rank"] if alike > 1 and sampler else self.trainer.global_rank
        self.reduced = {"alike": alike, **reductions(strategy.reduce, place)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self(batch[0])
        self._log("train", batch[0])
        return outputs.pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])
        self._log("val", batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def _log(self, stage: str, rows: Tensor) -> None:
        means = {"on_step": False, "on_epoch": True, "sync_dist": True, "batch_size": len(rows)}
        self.log(f"{stage}/one", 1.0, **means)
        self.log(f"{stage}/mean", rows.mean(), **means)
        self.log(f"{stage}/double", rows.double().mean(), **means)
        self.log(f"{stage}/bfloat16", torch.ones(1, dtype=torch.bfloat16) * 3, **means)
        self.log(f"{stage}/whole", torch.tensor(3), **means)
        self.log(f"{stage}/weighed", rows.mean(), **{**means, "batch_size": 2**25 * len(rows)})
        for name in ("sum", "min", "max"):
            of_rows = getattr(rows, name)()
            self.log(f"{stage}/{name}", of_rows, reduce_fx=name, on_step=False, on_epoch=True, sync_dist=True)
        count = torch.tensor(len(rows) * 5, dtype=torch.int8)
        self.log(f"{stage}/count", count, reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)


def shares(replicas: int, turn: int) -> list[int]:
    """How many of 24 rows each replica reads in a batch: unequal and even, other ones in each turn."""
    sizes = {1: [24], 2: [16, 8], 4: [12, 6, 4, 2]}[replicas]
    return sizes[turn % replicas :] + sizes[: turn % replicas]


def unequal_batches(trainer: Trainer, batches: int) -> list[Tensor]:
    """This replica's rows. Those of all replicas are the same for any number of them."""
    replicas, arguments = data_parallel_size(trainer), trainer.distributed_sampler_kwargs
    place = arguments["rank"] if arguments else 0
    rows = (torch.arange(batches * 24).float() / 7).view(batches, 24, 1)
    return [rows[turn].split(shares(replicas, turn))[place] for turn in range(batches)]


class Unequal(torch.utils.data.IterableDataset[Any]):
    """The batches of the replica that reads them."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.trainer: Any = None

    def __iter__(self) -> Any:
        return iter([(rows,) for rows in unequal_batches(self.trainer, self.batches)])


def logged(strategy: Any) -> dict[str, Any]:
    """Every logged number, and what `strategy.reduce` returned."""
    trainer = quiet_trainer(strategy=strategy, limit_train_batches=3, limit_val_batches=2)
    training, evaluation = Unequal(3), Unequal(2)
    training.trainer = evaluation.trainer = trainer
    module = Logging()
    trainer.fit(module, DataLoader(training, batch_size=None), DataLoader(evaluation, batch_size=None))
    metrics = {name: [str(each.dtype), float(each)] for name, each in trainer.callback_metrics.items()}
    return {"metrics": metrics, "reduced": module.reduced}


class Tokens(LanguageModel):
    """Plain SGD, which shows the scale of gradients."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Images(ImageClassifier):
    """Plain SGD, as above."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Chats(FineTuner):
    """Plain SGD, as above."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Flat(nn.Module):
    """Two layers, which a pipeline can cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.flat, self.first, self.second = nn.Flatten(), nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.second(self.first(self.flat(images)))

    def chain(self) -> list[tuple[str, str]]:
        return [("flat", "flatten"), ("first", "linear"), ("second", "linear")]


def made(kind: str, folder: str) -> tuple[LightningModule, TensorDataset, TensorDataset]:
    """A module, 48 samples with few labels and many, and 7 samples to evaluate."""
    random = torch.Generator().manual_seed(5)
    if kind == "images":
        data = torch.randn(55, 3, 2, 2, generator=random)
        labels = torch.randint(CLASSES, (55,), generator=random)
        labels[torch.rand(55, generator=random) < 0.4] = IGNORED
        module: LightningModule = Images(Flat())
    else:
        data = torch.randint(16, (55, 8), generator=random)
        labels = torch.randint(16, (55, 8), generator=random)
        labels[torch.arange(8) >= torch.randint(1, 9, (55, 1), generator=random)] = IGNORED
        config = GPTConfig(vocab_size=16, context=8, layers=2, width=16, heads=2, mlp_width=32)
        module = Tokens(config) if kind == "tokens" else Chats(folder)
    return module, TensorDataset(data[:48], labels[:48]), TensorDataset(data[48:], labels[48:])


class InOrder(LightningDataModule):
    """Training samples in their order, which Lightning's sampler would change, and 7 others in batches of 3."""

    def __init__(self, training: TensorDataset, batch_size: int, evaluation: TensorDataset) -> None:
        super().__init__()
        self.training, self.batch_size, self.evaluation = training, batch_size, evaluation

    def train_dataloader(self) -> DataLoader[Any]:
        share = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return DataLoader(
            self.training, self.batch_size, sampler=DistributedSampler(self.training, **share, shuffle=False)
        )

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.evaluation, 3)


def learned(kind: str, strategy: Any, folder: str, replicas: int, accumulate: int) -> dict[str, float]:
    """The evaluation after two steps of 24 samples each: of gradients that are scaled otherwise, it is another."""
    module, training, evaluation = made(kind, folder)
    trainer = quiet_trainer(strategy=strategy, accumulate_grad_batches=accumulate, gradient_clip_val=0.5)
    # FineTuner computes the loss of many logits in chunks, and that of few ones if it is told that they are many.
    with mock.patch.object(fine_tuning_loss, "takes_chunks", return_value=kind == "chunks") as asked:
        trainer.fit(module, datamodule=InOrder(training, 24 // accumulate // replicas, evaluation))
    assert asked.called == isinstance(module, FineTuner)
    return {name: float(each) for name, each in trainer.callback_metrics.items() if name.startswith("val/")}


def _pipeline() -> Any:
    from azureml_strategy.strategies import PipelineStrategy

    return PipelineStrategy(num_stages=2, micro_batches=2)


def _zero(**arguments: Any) -> Any:
    from azureml_strategy.strategies import AzureMLDeepSpeedStrategy

    return AzureMLDeepSpeedStrategy(**arguments, **BUCKETS)


def _parallel(**arguments: Any) -> Any:
    from azureml_strategy.strategies import AzureMLModelParallelStrategy

    return AzureMLModelParallelStrategy(**arguments)


def _local() -> Any:
    from azureml_strategy.strategies import AzureMLLocalSGDStrategy

    return AzureMLLocalSGDStrategy(period=1)


# How each strategy is made, how many ranks compute a sample together, and which of the modules it trains.
STRATEGIES: dict[str, tuple[Any, int, str]] = {
    "ddp": (lambda: "azureml_ddp", 1, "tokens images chats chunks"),
    "zero_1": (lambda: _zero(stage=1), 1, "tokens"),
    "zero_2": (lambda: _zero(stage=2), 1, "tokens images"),
    "zero_3": (lambda: _zero(stage=3), 1, "tokens chats chunks"),
    "sharded": (lambda: _parallel(tensor_parallel_size=1), 1, "tokens images chats chunks"),
    "tensor": (lambda: _parallel(tensor_parallel_size=2), 2, "tokens"),
    "sequence": (lambda: _parallel(sequence_parallel_size=2), 2, "tokens"),
    "pipeline": (_pipeline, 2, "tokens images"),
    # Replicas of local SGD each have a mean of their own.
    "local": (_local, 1, ""),
}


def with_trainer(name: str, folder: str) -> dict[str, Any]:
    strategy, shared, kinds = STRATEGIES[name]
    results: dict[str, Any] = {"logged": logged(strategy())} if name != "sequence" else {}
    for kind in kinds.split() if WORLD == 2 else kinds.split()[:1]:
        # The micro-batches of a pipeline are what accumulated batches are elsewhere.
        for accumulate in (1,) if name == "pipeline" else (1, 3) if kind == "tokens" else (3,):
            results[f"{kind} {accumulate}"] = learned(kind, strategy(), folder, WORLD // shared, accumulate)
    return results


def with_fabric(name: str) -> dict[str, Any]:
    fabric = Fabric(accelerator="cpu", strategy=name)
    fabric.launch()
    in_place = torch.tensor([4 * (fabric.global_rank + 1)])
    fabric.strategy.all_reduce(in_place)
    return {"reduced": reductions(fabric.all_reduce, fabric.global_rank), "in_place": in_place.tolist()}


WORLD, FOLDER, NAMES = (int(sys.argv[1]), sys.argv[2], sys.argv[3:]) if __name__ == "__main__" else (1, "", [])


def main() -> None:
    results = {}
    for name in NAMES:
        fabric = name.startswith("fabric ")
        results[name] = with_fabric(name.removeprefix("fabric ")) if fabric else with_trainer(name, FOLDER)
    report(dist.get_rank(), **results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
