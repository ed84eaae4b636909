"""What hooks see of gradients and do to them, under every strategy: numbers, and the weights after the steps."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import grad_norm as lightnings_grad_norm
from tests.multiprocess.scripts.common import FEATURES, SAMPLES, Rows, quiet_trainer, report
from tests.multiprocess.scripts.strategies import BUCKETS
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from azureml_strategy.gradients import (
    clip_grad_norm,
    clip_grad_value,
    edit_gradients,
    full_gradients,
    grad_norm,
    scale_gradients,
    total_norm,
)
from azureml_strategy.strategies import (
    AzureMLDDPStrategy,
    AzureMLDeepSpeedStrategy,
    AzureMLLocalSGDStrategy,
    AzureMLModelParallelStrategy,
    PipelineStrategy,
)
from azureml_strategy.strategies.errors import ConfigurationError

BATCH = 8  # of all ranks together
Numbers = dict[str, Any]
STRATEGIES: dict[str, Callable[..., Any]] = {
    "ddp": partial(AzureMLDDPStrategy, find_unused_parameters=True),
    "zero_1": partial(AzureMLDeepSpeedStrategy, stage=1, **BUCKETS),
    "zero_2": partial(AzureMLDeepSpeedStrategy, stage=2, **BUCKETS),
    "zero_3": partial(AzureMLDeepSpeedStrategy, stage=3, **BUCKETS),
    "offload_2": partial(AzureMLDeepSpeedStrategy, stage=2, offload_optimizer=True, **BUCKETS),
    "offload_3": partial(AzureMLDeepSpeedStrategy, stage=3, offload_optimizer=True, offload_parameters=True, **BUCKETS),
    "fsdp2": partial(AzureMLModelParallelStrategy, tensor_parallel_size=1),
    "tensor_parallel": partial(AzureMLModelParallelStrategy, tensor_parallel_size=2),
    "local_sgd": partial(AzureMLLocalSGDStrategy, period=1, warmup_steps=100, find_unused_parameters=True),
    "pipeline": partial(PipelineStrategy, num_stages=2, micro_batches=2),
    "pipeline_zero": partial(PipelineStrategy, num_stages=1, micro_batches=2, zero_stage=1),
}


class Layered(LightningModule):
    """Parameters of uneven sizes, one that is frozen and one that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(FEATURES, 12)
        self.act = nn.Tanh()
        self.down = nn.Linear(12, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 1)
        self.unused = nn.Linear(3, 1)
        self.seen: list[Numbers] = []

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.frozen(self.down(self.act(self.up(rows)))))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return (self(batch[0]).squeeze(1) - batch[0].sum(dim=1)).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """A batch of all ranks together has the same samples whatever their number."""
        places = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        replicas = places["num_replicas"]
        return DataLoader(Rows(), BATCH // replicas, sampler=range(places["rank"], SAMPLES, replicas))

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        return {"up": "colwise", "down": "rowwise"}

    def sharded_blocks(self) -> list[nn.Module]:
        return [self.head]

    def on_train_end(self) -> None:
        self.seen.append({"weights": {name: whole(each).flatten().tolist() for name, each in self.named_parameters()}})


class Helped(Layered):
    """Each step uses another function of `azureml_strategy.gradients`."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        step = self.trainer.global_step
        numbers: Numbers = {"norms": plain(grad_norm(self, 2))}
        if step == 0:
            numbers["largest"] = plain(grad_norm(self, "inf", "."))
            numbers["third"] = float(total_norm(self, 3))
            numbers["gradients"] = {name: gradient.flatten().tolist() for name, gradient in full_gradients(self)}
        elif step == 1:
            numbers["before"] = float(clip_grad_norm(self, 0.1))
        elif step == 2:
            clip_grad_value(self, 0.05)
        elif step == 3:
            edit_gradients(self, edited)
        elif step == 4:
            scale_gradients(self, 0.5)
        numbers["after"] = float(total_norm(self))
        self.seen.append(numbers)


class Stock(Layered):
    """Uses what torch and Lightning have, in the hook that their pages name."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        step, trained = self.trainer.global_step, [each for each in self.parameters() if each.requires_grad]
        numbers: Numbers = {}
        if step == 0:
            numbers["norms"] = plain(lightnings_grad_norm(self, 2))
            numbers["largest"] = plain(lightnings_grad_norm(self, "inf"))
        elif step == 1:
            numbers["before"] = float(torch.nn.utils.clip_grad_norm_(trained, 0.1))
        elif step == 2:
            numbers["norm"] = float(
                torch.nn.utils.get_total_norm([each.grad for each in trained if each.grad is not None])
            )
        elif any(each.grad is not None for each in trained):
            torch.nn.utils.clip_grad_value_(trained, 0.05)
            for each in trained:
                if each.grad is not None:
                    each.grad.mul_(0.5)
        self.seen.append(numbers)


class ByHook(Layered):
    """Clips by a hook of its own, to other numbers than the Trainer's."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if self.trainer.global_step < 2:
            self.clip_gradients(optimizer, 0.1, "norm")
        elif self.trainer.global_step < 4:
            self.clip_gradients(optimizer, 0.1, "value")


class ByHand(Layered):
    """Optimizes manually."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx == 0:
            self.clip_gradients(optimizer, 0.1, "norm")
        elif batch_idx == 1:
            self.clip_gradients(optimizer, 0.05, "value")
        elif batch_idx == 2:
            self.seen.append({"before": float(clip_grad_norm(self, 0.2))})
        optimizer.step()


class Sometimes(Layered):
    """Uses a layer in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(FEATURES, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.extra(batch[0]).pow(2).mean() if batch_idx in (0, 3) else loss


class Accumulating(Helped):
    """Asks for gradients while they are not complete, too."""

    def on_after_backward(self) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_progress.current.ready == 1:
            try:
                total_norm(self)
                self.refused = ""
            except ConfigurationError as error:
                self.refused = str(error)


class InParts(Helped):
    """The same in a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        del self.unused, self.frozen

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.down(self.act(self.up(rows))))

    def pipeline_layers(self) -> list[Any]:
        return [Part(name, getattr(self, name)) for name in ("up", "act", "down", "head")]

    def pipeline_batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch


class Part:
    kind, tied, tied_parameter = "layer", None, "weight"

    def __init__(self, name: str, layer: nn.Module) -> None:
        self.name, self._layer = name, layer

    def build(self) -> nn.Module:
        return self._layer


def edited(name: str, gradient: Tensor) -> Tensor | None:
    if name.startswith("up."):
        return gradient * 0.1
    if name.startswith("head."):
        gradient.zero_()
    return None


def whole(parameter: Tensor) -> Tensor:
    if isinstance(parameter, DTensor):
        return parameter.detach().full_tensor()
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameter):
            return parameter.detach().clone()
    return parameter.detach()


def plain(norms: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(norm) for name, norm in norms.items()}


def fit(module: Layered, strategy: Any = "auto", **arguments: Any) -> list[Numbers]:
    trainer = quiet_trainer(
        strategy=strategy,
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        limit_train_batches=6,
        use_distributed_sampler=False,
        **arguments,
    )
    trainer.fit(module)
    return module.seen


def oracle(kind: type[Layered], **arguments: Any) -> list[Numbers]:
    """What one process finds with stock Lightning."""
    return fit(kind(), **arguments)


# The module and the arguments of the Trainer of each case.
CASES: dict[str, tuple[type[Layered], dict[str, Any]]] = {
    "helped": (Helped, {}),
    "stock": (Stock, {}),
    "by_hook": (ByHook, {"gradient_clip_val": 0.1}),
    "by_hand": (ByHand, {}),
    "norm": (Layered, {"gradient_clip_val": 0.1}),
    "value": (Layered, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
    "accumulating": (Accumulating, {"accumulate_grad_batches": 2}),
    "sometimes": (Sometimes, {}),
    "pipeline": (InParts, {}),
}


def runs(strategy: str, case: str, ranks: int) -> bool:
    if ranks == 1 and strategy in ("tensor_parallel", "pipeline", "local_sgd"):
        return False
    if strategy.startswith("pipeline"):
        return case == "pipeline"
    of_zero = strategy.startswith(("zero", "offload"))
    refused = (of_zero and case == "value") or (strategy == "local_sgd" and case == "by_hand")
    return case != "pipeline" and not refused


def main() -> None:
    ranks, results = int(os.environ["WORLD_SIZE"]), {}
    chosen = tuple(sys.argv[1].split(";"))  # how their names begin
    for name, strategy in STRATEGIES.items():
        for case, (kind, arguments) in CASES.items():
            if f"{name} {case}".startswith(chosen) and runs(name, case, ranks):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    module = kind()
                    fit(module, strategy(process_group_backend="gloo"), **arguments)
                said = [str(each.message) for each in caught if "gradient" in str(each.message).lower()]
                results[f"{name} {case}"] = {
                    "seen": module.seen,
                    "said": said,
                    "refused": getattr(module, "refused", None),
                }
    report(int(os.environ["RANK"]), **results)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
