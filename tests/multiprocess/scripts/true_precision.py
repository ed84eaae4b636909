"""What `bf16-true` leaves precise under each strategy: tables of models of transformers, and running statistics.

And what each strategy says of a layer that trains in evaluation mode.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning import Fabric
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.strategies import Strategy
from tests.multiprocess.scripts.common import quiet_trainer, report
from tests.multiprocess.scripts.strategies import BUCKETS
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from azureml_strategy.gradients import grad_norm
from azureml_strategy.huggingface import load_pretrained
from azureml_strategy.lightning_internals import average_of
from azureml_strategy.strategies import (
    AzureMLDDPStrategy,
    AzureMLDeepSpeedStrategy,
    AzureMLLocalSGDStrategy,
    AzureMLModelParallelStrategy,
    PipelineStrategy,
)
from azureml_strategy.strategies.fabric import (
    FabricDDPStrategy,
    FabricDeepSpeedStrategy,
    FabricModelParallelStrategy,
)

WORLD = int(os.environ["WORLD_SIZE"])
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": AzureMLDDPStrategy,
    "local_sgd": partial(AzureMLLocalSGDStrategy, period=1),
    "zero_1": partial(AzureMLDeepSpeedStrategy, stage=1, **BUCKETS),
    "zero_3": partial(AzureMLDeepSpeedStrategy, stage=3, **BUCKETS),
    "fsdp2": AzureMLModelParallelStrategy,
    "tensor": partial(AzureMLModelParallelStrategy, tensor_parallel_size=WORLD),
    "pipeline": partial(PipelineStrategy, num_stages=WORLD, micro_batches=1),
}
FABRIC: dict[str, Callable[[], Any]] = {
    "ddp": FabricDDPStrategy,
    "zero_3": partial(FabricDeepSpeedStrategy, stage=3, **BUCKETS),
    "fsdp2": FabricModelParallelStrategy,
}
STEPS = 20


class Far(LightningModule):
    """A model of transformers that sees tokens thousands of places apart. It compares its logits with known ones."""

    def __init__(self, folder: Path, late: bool) -> None:
        super().__init__()
        self.folder, self.late = folder, late
        self.known = torch.load(folder / "logits.pt")
        self.difference = 0.0
        self.model: Any = None if late else load_pretrained(folder)

    def configure_model(self) -> None:
        if self.late:
            self.model = load_pretrained(self.folder)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch)
        if output.logits is not None:  # not on the first stages of a pipeline
            self.difference = float((output.logits.float() - self.known).abs().max())
        loss: Tensor = output.loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _mean() -> MeanMetric:
    return MeanMetric(sync_on_compute=False)


class Normalised(LightningModule):
    """Statistics that move by less than bfloat16 can tell, a mean of inputs, and metrics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.01), nn.Linear(4, 1))
        nn.init.constant_(self.network[0].bias, 4.0)
        nn.init.zeros_(self.network[0].weight)
        self.register_buffer("offsets", torch.arange(1000, 1004, dtype=torch.float32))
        self.metrics = MetricCollection({"sum": SumMetric(sync_on_compute=False), "mean": _mean()})

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs - self.offsets)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.metrics.update(1001 + batch_idx)
        return self(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def difference(folder: Path, strategy: Strategy, late: bool = True) -> float:
    module = Far(folder, late)
    row = torch.load(folder / "row.pt")
    trainer = quiet_trainer(strategy=strategy, precision="bf16-true", max_steps=1)
    trainer.fit(module, DataLoader([row] * WORLD, batch_size=1))
    return module.difference


def statistics() -> dict[str, Any]:
    found = {}
    for name in ("ddp", "local_sgd", "zero_1", "zero_3", "fsdp2"):
        module = Normalised()
        trainer = quiet_trainer(strategy=STRATEGIES[name](), precision="bf16-true", max_steps=STEPS)
        seen: dict[str, Any] = {}
        module.on_train_end = partial(_note, module, seen)  # type: ignore[method-assign]
        rows = torch.zeros(STEPS * 4 * WORLD, 4)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            trainer.fit(module, DataLoader(rows, batch_size=4))
        told = [str(each.message) for each in warned if "rounds offsets to bfloat16" in str(each.message)]
        found[name] = {**seen, "after": str(module.network[1].running_mean.dtype), "told": len(told)}
    return found


def modes() -> dict[str, list[str]]:
    """What the first warning of each strategy names, of a module with a layer in evaluation mode."""
    found = {}
    for name in ("ddp", "local_sgd", "zero_1", "zero_3", "fsdp2"):
        module = Normalised()
        module.network[0].eval()
        trainer = quiet_trainer(strategy=STRATEGIES[name](), max_steps=2)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            trainer.fit(module, DataLoader(torch.zeros(8 * WORLD, 4), batch_size=4))
        told = [str(each.message) for each in warned]
        found[name] = [each.partition(" will train")[0] for each in told if "in evaluation mode" in each]
    return found


class Rotary(nn.Module):
    """A table that bfloat16 cannot compute, and tensors that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = 1.0 / (10000 ** (torch.arange(0, 8, 2) / 8))
        self.register_buffer("table", torch.outer(torch.arange(5000), frequencies).cos(), persistent=False)
        self.layer = nn.Linear(4, 1)
        self.plain = [torch.linspace(0, 1, 4)]
        self.chosen = torch.linspace(0, 1, 4, dtype=torch.float32)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs + self.table[4001].to(inputs.device) + self.plain[0].to(inputs.device)
        shown: Tensor = self.layer(inputs)
        return shown

    def look(self) -> dict[str, Any]:
        frequencies = 1.0 / (10000 ** (torch.arange(0, 8, 2, dtype=torch.float64) / 8))
        exact = torch.outer(torch.arange(5000, dtype=torch.float64), frequencies).cos()
        return {
            "error": float((self.table.cpu() - exact).abs().max()),
            "types": [str(each.dtype) for each in (self.table, self.layer.weight, self.plain[0], self.chosen)],
        }


class Tried(Rotary):
    """Its constructor asks for the shape of what comes out of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = tuple(self.layer(torch.zeros(1, 4)).shape)


class Late(LightningModule):
    """Its model is built in `configure_model`."""

    def __init__(self, build: Callable[[], Any]) -> None:
        super().__init__()
        self.build, self.seen = build, {}
        self.model: Any = None

    def configure_model(self) -> None:
        self.model = self.build().train()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen = self.model.look()
        loss: Tensor = self.model(batch).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Stock(Late):
    """It compares its model's logits with known ones."""

    def __init__(self, build: Callable[[], Any], known: Tensor) -> None:
        super().__init__(build)
        self.known = known

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        output = self.model(**batch)
        self.seen = {
            "difference": float((output.logits.float() - self.known).abs().max()),
            "float32": [name for name, each in self.model.named_parameters() if each.dtype == torch.float32],
        }
        loss: Tensor = output.loss
        return loss


class Averaged(LightningModule):
    """Weights of which an average moves by less than bfloat16 can tell."""

    def __init__(self, half: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8, dtype=torch.bfloat16 if half else torch.float32)
        self.weights: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean() + self.layer.weight.pow(2).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layer(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        self.weights.append(whole(self.layer.weight))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def whole(weight: Tensor) -> Tensor:
    weight = weight.detach()
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).double().clone()


def averages() -> dict[str, float]:
    """How far Lightning's moving average is from one in float64, with validations on the way."""
    found = {}
    for name, kinds in {"ddp": (False, True), "zero_1": (False,), "fsdp2": (True,)}.items():
        for half in kinds:
            module, callback = Averaged(half), EMAWeightAveraging(decay=0.99)
            trainer = quiet_trainer(
                strategy=STRATEGIES[name](),
                precision="bf16-true",
                max_steps=STEPS,
                callbacks=[callback],
                val_check_interval=5,
                limit_val_batches=1,
            )
            rows = DataLoader(torch.zeros(STEPS * WORLD, 8), batch_size=1)
            trainer.fit(module, rows, DataLoader(torch.zeros(WORLD, 8), batch_size=1))
            exact = module.weights[0]
            for each in module.weights[1:]:
                exact = 0.99 * exact + 0.01 * each
            average = dict(average_of(callback).named_parameters())["module.layer.weight"]
            found[f"{name} {half}"] = float((whole(average) - exact).abs().max())
    return found


class LateAveraged(Averaged):
    """Its layer is made in `configure_model`, after StochasticWeightAveraging has copied the module."""

    def __init__(self, early: bool) -> None:
        super().__init__(half=False)
        self.layer: Any = self.layer if early else None

    def configure_model(self) -> None:
        if self.layer is None:
            torch.manual_seed(0)
            self.layer = nn.Linear(8, 8)


def stochastic() -> list[float]:
    """The first weight that StochasticWeightAveraging leaves, of a module that is built late and of one built early."""
    found = []
    for early in (False, True):
        module = LateAveraged(early)
        callback = StochasticWeightAveraging(0.1, swa_epoch_start=1)
        trainer = quiet_trainer(strategy=AzureMLDDPStrategy(), max_epochs=3, callbacks=[callback])
        trainer.fit(module, DataLoader(torch.ones(2 * WORLD, 8), batch_size=1))
        found.append(float(module.layer.weight.detach()[0, 0]))
        assert found[-1] != float(module.weights[-1][0, 0]), "it has averaged"
    return found


class Added(LightningModule):
    """Each batch of a step adds less to the gradient than bfloat16 can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.norm = 0.0

    def forward(self, batch: Tensor) -> Tensor:
        return (self.weight * batch).sum()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norm = float(grad_norm(self)["grad_2.0_norm_total"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def sums() -> dict[str, Any]:
    """The norm of a gradient of 17 batches, and whether it is said that it may be off."""
    found = {}
    rows = torch.ones(17, 1, 4).repeat_interleave(WORLD, 0)
    rows[:WORLD] = 512.0
    for stage in (2, 3):
        module = Added()
        trainer = quiet_trainer(
            strategy=AzureMLDeepSpeedStrategy(stage=stage, **BUCKETS),
            precision="bf16-mixed",
            max_steps=1,
            accumulate_grad_batches=17,
        )
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            trainer.fit(module, DataLoader(rows, batch_size=None))
        told = sum("adds up the gradients of 17 batches in bfloat16" in str(each.message) for each in warned)
        found[f"zero_{stage}"] = {"norm": module.norm, "told": told}
    return found


def own_average() -> int:
    """How many warnings name an average of the user's own."""
    module = Averaged(half=False)
    module.average = AveragedModel(module.layer)
    trainer = quiet_trainer(
        strategy=AzureMLDDPStrategy(find_unused_parameters=True), precision="bf16-true", max_steps=1
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(torch.zeros(WORLD, 8), batch_size=1))
    return sum(str(each.message).startswith("average averages weights in 16 bits") for each in warned)


def tables() -> dict[str, Any]:
    """What a user's constructors in `configure_model` and `fabric.init_module` have computed."""
    found = {}
    for name in ("ddp", "local_sgd", "zero_1", "zero_3", "fsdp2"):
        module = Late(Rotary if name == "zero_3" else Tried)
        trainer = quiet_trainer(strategy=STRATEGIES[name](), precision="bf16-true", max_steps=1)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            trainer.fit(module, DataLoader(torch.zeros(4 * WORLD, 4), batch_size=4))
        told = [str(each.message) for each in warned if "rounds model.table, model.plain" in str(each.message)]
        found[name] = {**module.seen, "told": len(told)}
    for name, make in FABRIC.items():
        fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=make(), precision="bf16-true")
        fabric.launch()
        with fabric.init_module():
            built = Rotary()
        fabric.setup(built, torch.optim.SGD(built.parameters(), lr=0.0))
        found[f"fabric_{name}"] = {**built.look(), "told": 1 - int(os.environ["RANK"])}
    return found


def stock(folders: Path, every: bool) -> dict[str, Any]:
    """What `from_pretrained` in `configure_model` gives, and which parameters stay float32."""
    import transformers

    found: dict[str, Any] = {}
    for folder in sorted(folders.iterdir()):
        kind, dtype, known, row = torch.load(folder / "known.pt")
        precision = {torch.bfloat16: "bf16-true", torch.float16: "16-true"}[dtype]
        for name in ("ddp", "fsdp2") if dtype == torch.float16 else ("ddp", "zero_1", "zero_3", "fsdp2"):
            for asked in (None, dtype) if every else (None,):
                build = partial(getattr(transformers, kind).from_pretrained, folder, dtype=asked or "auto")
                module = Stock(build, known)
                trainer = quiet_trainer(strategy=STRATEGIES[name](), precision=precision, max_steps=1)
                with warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter("always")
                    trainer.fit(module, DataLoader([row] * WORLD, batch_size=None))
                told = [each for each in warned if "which transformers keeps in float32" in str(each.message)]
                found[f"{folder.name} {name} {asked}"] = {**module.seen, "told": len(told)}
    return found


def _note(module: Normalised, seen: dict[str, Any]) -> None:
    mean = module.network[1].running_mean
    seen |= {"mean": mean.tolist(), "type": str(mean.dtype), "offsets": str(module.offsets.dtype)}
    seen["metrics"] = {name: float(value) for name, value in module.metrics.compute().items()}


def main() -> None:
    if sys.argv[1] == "sums":
        found = {
            "tables": tables(),
            "averages": averages(),
            "own_average": own_average(),
            "sums": sums(),
            "stochastic": stochastic(),
        }
    else:
        folders, others = map(Path, sys.argv[2:4])
        found = {
            "strategies": {name: difference(folders / "llama", make()) for name, make in STRATEGIES.items()},
            "early": difference(folders / "llama", AzureMLDDPStrategy(), late=False),
            "families": {each.name: difference(each, AzureMLDDPStrategy()) for each in sorted(folders.iterdir())},
            "statistics": statistics(),
            "modes": modes(),
            "stock": stock(others, every=sys.argv[4] == "all"),
        }
    report(int(os.environ["RANK"]), **found)


main()
