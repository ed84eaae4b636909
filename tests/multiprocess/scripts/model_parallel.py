"""A small transformer under azureml_model_parallel and, in the same processes, under DDP."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from common import MeanLosses, quiet_trainer, report
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader

from azureml_strategy.models import GPTConfig, LanguageModel
from azureml_strategy.strategies import AzureMLDDPStrategy, AzureMLModelParallelStrategy

TOKENS, LENGTH, HEADS, SAMPLES, GLOBAL_BATCH, STEPS = 32, 8, 4, 48, 16, 6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        # Without biases: that of the keys has no gradient but rounding errors, which AdamW would make into full steps.
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.mixed = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        states = self.norm(hidden)
        heads = [
            matrix(states).unflatten(-1, (-1, self.norm.normalized_shape[0] // HEADS)).transpose(1, 2)
            for matrix in (self.query, self.key, self.value)
        ]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.mixed(attended)
        return hidden + self.down(functional.gelu(self.up(hidden)))


class Transformer(LightningModule):
    """Tied embeddings cut by rows, positions that belong to no layer, a step that does not call `forward`."""

    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(TOKENS, width)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.output = nn.Linear(width, TOKENS, bias=False)
        self.output.weight = self.embedding.weight
        nn.init.normal_(self.output.weight, std=0.3)
        self.losses: list[float] = []
        self.seen: list[float] = []

    def loss(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens[:, :-1]) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.output(hidden).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(float(batch.double().mean()))
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def sharded_blocks(self) -> nn.ModuleList:
        return self.blocks

    def tensor_parallel_counts(self) -> Mapping[str, int]:
        return {"heads": HEADS}

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        return {
            "embedding": "rowwise",
            "blocks.*.[qkv]*": "colwise",
            "blocks.*.mixed": "rowwise",
            "blocks.*.up": "colwise",
            "blocks.*.down": "rowwise",
            "output": "colwise_gather_output",
        }


class SpreadsItself(LightningModule):
    """As Lightning's documentation shows it: everything in `configure_model`, from the device mesh."""

    training_step, on_train_batch_end = Transformer.training_step, Transformer.on_train_batch_end
    configure_optimizers = Transformer.configure_optimizers

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Embedding(TOKENS, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, TOKENS))
        self.losses: list[float] = []
        self.seen: list[float] = []

    def configure_model(self) -> None:
        plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
        parallelize_module(self.network, self.device_mesh["tensor_parallel"], plan)
        fully_shard(self.network, mesh=self.device_mesh["data_parallel"])

    def loss(self, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(self.network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class NoisyBatches(Transformer):
    """Draws the first token of each row at random, another one on each rank."""

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        noise = torch.Generator().manual_seed(100 * self.global_rank + self.global_step)
        batch[:, 0] = torch.randint(TOKENS, (len(batch),), generator=noise)
        return batch


class Memory(Callback):
    """Bytes of parameters, gradients and optimizer state on this rank, at the second step."""

    measured = 0

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step == 1:
            gc.collect()
            storages = {}
            for tensor in [one for one in gc.get_objects() if isinstance(one, Tensor) and not isinstance(one, DTensor)]:
                if tensor.is_floating_point():
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            self.measured = sum(storages.values())


class SaveAfter(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def rows() -> Tensor:
    return torch.randint(TOKENS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(3))


def loader(replicas: int) -> DataLoader[Tensor]:
    return DataLoader(rows(), batch_size=GLOBAL_BATCH // replicas)


def whole(parameter: Tensor) -> Tensor:
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def fit(
    strategy: Strategy, replicas: int = 2, model: Any = None, *, resume: Path | None = None, **arguments: Any
) -> dict[str, Any]:
    """Two epochs of three steps, each of a global batch of 16 rows, whatever the layout."""
    model = Transformer() if model is None else model
    batches = loader(replicas)
    trainer = quiet_trainer(strategy=strategy, **{"max_epochs": 2, "gradient_clip_val": 0.5, **arguments})
    trainer.fit(model, batches, batches if isinstance(model, Transformer) else None, ckpt_path=resume)
    return {
        "losses": model.losses,
        "val_loss": float(trainer.callback_metrics.get("val_loss", 0.0)),
        "parameters": torch.cat([whole(parameter).flatten() for parameter in model.parameters()]).tolist(),
        "replicas": trainer.distributed_sampler_kwargs["num_replicas"],
        "seen": model.seen,
    }


def sharded(tensor_parallel_size: Any = 1, **arguments: Any) -> AzureMLModelParallelStrategy:
    return AzureMLModelParallelStrategy(tensor_parallel_size=tensor_parallel_size, **arguments)


def memory() -> dict[str, float]:
    """Measured bytes, those of one process, and those of the largest block."""
    model = Transformer(width=64, layers=4)
    single = 4 * 4 * sum(parameter.numel() for parameter in model.parameters())
    block = 4 * sum(parameter.numel() for parameter in model.blocks[0].parameters())
    callback = Memory()
    fit(sharded(), 2, model, max_epochs=1, limit_train_batches=3, limit_val_batches=0, callbacks=[callback])
    return {"measured": callback.measured, "single": single, "block": block}


def gpt(strategy: Strategy, replicas: int) -> dict[str, Any]:
    """The package's own, on the same rows."""
    shape = GPTConfig(vocab_size=TOKENS, context=LENGTH, layers=2, width=16, heads=HEADS, mlp_width=32, tied=False)
    model = LanguageModel(shape, learning_rate=3e-3, warmup_steps=2)
    noted = MeanLosses()
    pairs = [(row[:-1], row[1:]) for row in rows()]
    trainer = quiet_trainer(strategy=strategy, max_epochs=2, gradient_clip_val=0.5, callbacks=[noted])
    trainer.fit(model, DataLoader(pairs, batch_size=GLOBAL_BATCH // replicas))
    return {"losses": noted.losses}


def validate(strategy: Strategy, replicas: int) -> list[Any]:
    return quiet_trainer(strategy=strategy).validate(Transformer(), loader(replicas), verbose=False)


def two_ranks(folder: Path, every: bool) -> dict[str, Any]:
    one_file = {"save_distributed_checkpoint": False}
    results = {
        "ddp": fit(AzureMLDDPStrategy(), callbacks=[SaveAfter(folder / "ddp.ckpt")]),
        "fsdp": fit(sharded(), callbacks=[SaveAfter(folder / "fsdp.ckpt")]),
        "tensor": fit(sharded("auto"), 1, callbacks=[SaveAfter(folder / "tensor.ckpt")]),
        "file": fit(sharded(2, **one_file), 1, callbacks=[SaveAfter(folder / "file.ckpt")]),
        "fsdp_resumed": fit(sharded(), resume=folder / "fsdp.ckpt"),
        "tensor_resumed": fit(sharded(2), 1, resume=folder / "tensor.ckpt"),
        "from_ddp": fit(sharded(2), 1, resume=folder / "ddp.ckpt"),
        "to_ddp": fit(AzureMLDDPStrategy(), resume=folder / "file.ckpt"),
        "bf16_tensor": fit(sharded(2), 1, precision="bf16-mixed"),
        "bf16_ddp": fit(AzureMLDDPStrategy(), precision="bf16-mixed"),
        "bf16_true": fit(sharded(2), 1, precision="bf16-true"),
        "noisy": fit(sharded(2), 1, NoisyBatches()),
        "itself": fit(sharded("auto"), 1, SpreadsItself(), gradient_clip_val=None),
        "itself_stock": fit(stock(), 1, SpreadsItself(), gradient_clip_val=None, devices=2),
        "validated": [validate(AzureMLDDPStrategy(), 2), validate(sharded(2), 1)],
        "memory": memory(),
        "refused": refused(folder),
    }
    if every:
        results["accumulation"] = fit(sharded(), accumulate_grad_batches=2)
        results["accumulation_ddp"] = fit(AzureMLDDPStrategy(), accumulate_grad_batches=2)
        results["gpt"] = [gpt(AzureMLDDPStrategy(), 2), gpt(sharded(), 2), gpt(sharded(2), 1)]
        results["file_resumed"] = fit(sharded(2, **one_file), 1, resume=folder / "file.ckpt")
        results["activation_checkpointing"] = fit(sharded(2, activation_checkpointing=True), 1)
        results["bf16"] = fit(sharded(), precision="bf16-mixed")
    return results


def stock() -> ModelParallelStrategy:
    """Lightning's own, which sees the same processes."""
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    strategy.cluster_environment = sharded().cluster_environment
    return strategy


def refused(folder: Path) -> dict[str, str]:
    """What is refused before the first step, and the words."""

    class NoPlan(Transformer):
        tensor_parallel_plan = None  # type: ignore[assignment]

    cases: dict[str, tuple[Strategy, LightningModule, Path | None]] = {
        "no plan": (sharded(2), NoPlan(), None),
        "heads": (sharded(2), Transformer(), None),
        "matrix": (sharded(2), Transformer(width=16), None),
        "another model": (sharded(), Transformer(width=32), folder / "fsdp.ckpt"),
        "another layout": (sharded(), Transformer(), folder / "empty"),
        "compiled": (sharded(2, activation_checkpointing=True, compile="blocks"), Transformer(), None),
    }
    cases["heads"][1].tensor_parallel_counts = lambda: {"heads": 5}
    cases["matrix"][1].blocks[0].up = nn.Linear(16, 33)
    (folder / "empty").mkdir(exist_ok=True)
    words = {}
    for name, (strategy, model, resume) in cases.items():
        try:
            fit(strategy, 1, model, resume=resume)
        except ValueError as error:
            words[name] = str(error)
        assert not model.losses, name
    return words


def four_ranks(folder: Path, every: bool) -> dict[str, Any]:
    results = {
        "both": fit(sharded("auto"), callbacks=[SaveAfter(folder / "both.ckpt")]),
        "ddp": fit(AzureMLDDPStrategy(), 4),
        "from_one": fit(sharded("auto"), resume=folder / "alone.ckpt"),
    }
    if every:
        results["as_fsdp"] = fit(sharded(), 4, resume=folder / "both.ckpt")
        # sequences of each of two replicas shared by two ranks; those of one by two groups that share its layers
        results["gpt"] = [
            gpt(AzureMLDDPStrategy(), 4),
            gpt(sharded(1, sequence_parallel_size=2), 2),
            gpt(sharded(2, sequence_parallel_size=2), 1),
        ]
    return results


def save_alone(folder: Path, every: bool) -> dict[str, Any]:
    """Whatever the sizes are given as, one process has one part."""
    one_file = {"save_distributed_checkpoint": False}
    return {
        "alone": fit(sharded(), 1, callbacks=[SaveAfter(folder / "alone.ckpt")]),
        "sizes": fit(sharded("auto", data_parallel_size=1, sequence_parallel_size=1), 1),
        "file": fit(sharded(**one_file), 1, callbacks=[SaveAfter(folder / "file_alone.ckpt")]),
        "recomputing": fit(sharded(activation_checkpointing=True), 1),
        "alone_resumed": fit(sharded(), 1, resume=folder / "alone.ckpt"),
        "file_resumed": fit(sharded(**one_file), 1, resume=folder / "file_alone.ckpt"),
        "bf16": fit(sharded(), 1, precision="bf16-mixed"),
        "bf16_ddp": fit(AzureMLDDPStrategy(), 1, precision="bf16-mixed"),
    }


def resume_alone(folder: Path, every: bool) -> dict[str, Any]:
    return {"alone": fit(sharded(), 1, resume=folder / "tensor.ckpt")}


if __name__ == "__main__":
    import torch.distributed as dist

    parts = {part.__name__: part for part in (two_ranks, four_ranks, save_alone, resume_alone)}
    results = parts[sys.argv[1]](Path(sys.argv[2]), sys.argv[3] == "all")
    report(dist.get_rank(), **results)
    dist.destroy_process_group()
