"""A module whose buffers change while it trains, under strategies that leave to each rank its own."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tests.multiprocess.scripts.common import FEATURES, Regression, loader, report
from torch import Tensor, nn

from azureml_strategy.strategies import (
    AzureMLDDPStrategy,
    AzureMLDeepSpeedStrategy,
    AzureMLModelParallelStrategy,
    PipelineStrategy,
)

STRATEGIES: dict[str, Any] = {
    "ddp": AzureMLDDPStrategy,
    "zero_2": partial(AzureMLDeepSpeedStrategy, stage=2),
    "zero_3": partial(AzureMLDeepSpeedStrategy, stage=3),
    "fsdp2": AzureMLModelParallelStrategy,
    "fsdp2_recomputing": partial(AzureMLModelParallelStrategy, activation_checkpointing=True),
    "pipeline": partial(PipelineStrategy, num_stages=1, micro_batches=1),
}


class Centered(nn.Module):
    """Takes off a mean of what it has seen, which moves in training, and adds a table that never changes."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("table", torch.rand(features))  # other numbers on each rank
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and not _recomputes():
            with torch.no_grad():
                self.mean.lerp_(inputs.mean(0), 0.1)
            self.seen = self.seen + len(inputs)
        return inputs - self.mean + self.table


class Buffers(Regression):
    """Its losses depend on all buffers but the statistics, and its validation on these too."""

    def __init__(self) -> None:
        super().__init__(learning_rate=0.01)
        torch.manual_seed(int(os.environ["RANK"]))
        layers = (nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), Centered(16), nn.Linear(16, 1))
        torch.manual_seed(0)
        for layer in layers:
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        self.network = nn.Sequential(*layers)

    def forward(self, rows: Tensor) -> Tensor:
        return self.network(rows)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self(batch[0]).squeeze(1) - batch[0].sum(dim=1)).pow(2).mean()

    def sharded_blocks(self) -> list[nn.Module]:
        return [self.network[0], self.network[1]]

    def pipeline_layers(self) -> list[Any]:
        return [_Layer(f"network.{index}", layer) for index, layer in enumerate(self.network)]

    def pipeline_batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch


class _Layer:
    kind, tied, tied_parameter = "layer", None, "weight"

    def __init__(self, name: str, layer: nn.Module) -> None:
        self.name, self._layer = name, layer

    def build(self) -> nn.Module:
        return self._layer


class Notes(Callback):
    """Notes the buffers of this rank in each validation, and saves once, at the end of the first epoch."""

    def __init__(self, folder: Path) -> None:
        self.buffers: list[dict[str, Any]] = []
        self._path = folder

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.buffers.append({name: buffer.tolist() for name, buffer in pl_module.named_buffers()})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self._path)


def _recomputes() -> bool:
    return torch._C._current_graph_task_id() != -1


def fit(name: str, folder: Path, ckpt_path: Path | None = None) -> dict[str, Any]:
    module, notes = Buffers(), Notes(folder / f"{name}{'_again' if ckpt_path else ''}.ckpt")
    trainer = Trainer(
        strategy=STRATEGIES[name](process_group_backend="gloo"),
        accelerator="cpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        max_epochs=2,
        limit_train_batches=3,
        callbacks=[notes],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(), loader(), ckpt_path=ckpt_path)
    return {
        "losses": module.losses,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "buffers": notes.buffers,
        "path": str(notes._path),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    results: dict[str, Any] = {}
    for name in STRATEGIES:
        results[name] = fit(name, folder)
        if name != "ddp":
            results[f"{name}_again"] = fit(name, folder, Path(results[name]["path"]))
    report(int(os.environ["RANK"]), **results)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


main()
