"""Trains modules compiled and as they are, under each strategy, and reports losses, graphs and names.

python compiled.py BACKEND FOLDER STRATEGY/MODEL... : FOLDER has a tiny Llama, and gets checkpoints.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from tests.multiprocess.scripts.common import Losses, quiet_trainer, report
from tests.multiprocess.scripts.strategies import BUCKETS
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from azureml_strategy.interfaces import ChainLayer
from azureml_strategy.models import FineTuner, GPTConfig, ImageClassifier, LanguageModel, ResNet50
from azureml_strategy.strategies import (
    AzureMLDDPStrategy,
    AzureMLDeepSpeedStrategy,
    AzureMLLocalSGDStrategy,
    AzureMLModelParallelStrategy,
    PipelineStrategy,
)

RANKS = int(os.environ["WORLD_SIZE"])
STEPS, BATCH, WIDTH = 20, 4, 8
# Small parameters would stay whole under stage 3.
CUTS_ALL = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 2**16}
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "ddp": AzureMLDDPStrategy,
    "zero_1": partial(AzureMLDeepSpeedStrategy, stage=1, **BUCKETS),
    "zero_2": partial(AzureMLDeepSpeedStrategy, stage=2, **BUCKETS),
    "zero_3": partial(
        AzureMLDeepSpeedStrategy, config={"zero_allow_untested_optimizer": True, "zero_optimization": CUTS_ALL}
    ),
    "offload": partial(AzureMLDeepSpeedStrategy, stage=3, offload_optimizer=True, offload_parameters=True, **BUCKETS),
    "fsdp2": partial(AzureMLModelParallelStrategy, tensor_parallel_size=1),
    "recomputing": partial(AzureMLModelParallelStrategy, tensor_parallel_size=1, activation_checkpointing=True),
    "tensor_parallel": partial(AzureMLModelParallelStrategy, tensor_parallel_size=RANKS),
    "sequence_parallel": partial(AzureMLModelParallelStrategy, sequence_parallel_size=RANKS),
    "local_sgd": partial(AzureMLLocalSGDStrategy, period=2, warmup_steps=2),
    "diloco": partial(AzureMLLocalSGDStrategy, period=2, outer_learning_rate=0.7),
    "pipeline": partial(PipelineStrategy, num_stages=RANKS, micro_batches=2),
    "pipeline_recomputing": partial(PipelineStrategy, num_stages=RANKS, micro_batches=2, activation_checkpointing=1),
}
SHARES_BATCHES = ("pipeline", "pipeline_recomputing", "tensor_parallel", "sequence_parallel")


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, states: Tensor) -> Tensor:
        return states + self.outer(torch.tanh(self.inner(self.norm(states))))


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, states: Tensor, scale: float = 1.0) -> Tensor:
        return states + scale * self.down(torch.relu(self.up(states)))


class TwoKinds(LightningModule):
    """A user's module with two kinds of blocks, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.mixers = nn.ModuleList(Mixer() for _ in range(2))
        self.gates = nn.ModuleList(Gate() for _ in range(2))

    def _chain(self) -> dict[str, nn.Module]:
        names = ["stem", *(f"{kind}.{index}" for index in range(2) for kind in ("mixers", "gates")), "head"]
        return {name: self.get_submodule(name) for name in names}

    def forward(self, states: Tensor) -> Tensor:
        for layer in self._chain().values():
            states = layer(states)
        return states

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self(batch[0]).squeeze(1) - batch[1]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.03)

    def sharded_blocks(self) -> list[nn.Module]:
        return [*self.mixers, *self.gates]

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        return {"gates.*.up": "colwise", "gates.*.down": "rowwise"}

    def pipeline_layers(self) -> list[ChainLayer]:
        return [ChainLayer(partial(self.get_submodule, name), name, "layer") for name in self._chain()]

    def pipeline_batch(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0], batch[1]


def numbers() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def samples() -> int:
    """The last batch of an epoch has one half of the samples."""
    return BATCH * RANKS * 5 // 2


def rows() -> Dataset[Any]:
    values = torch.randn(samples(), WIDTH, generator=numbers())
    return TensorDataset(values, values.sum(1))


def tokens() -> Dataset[Any]:
    drawn = torch.randint(0, 64, (samples(), 17), generator=numbers())
    return TensorDataset(drawn[:, :-1], drawn[:, 1:])


def images() -> Dataset[Any]:
    pixels = torch.randint(0, 255, (samples(), 3, 32, 32), dtype=torch.uint8, generator=numbers())
    return TensorDataset(pixels, torch.randint(0, 10, (samples(),), generator=numbers()))


def gpt(**changes: Any) -> LightningModule:
    shape = {"vocab_size": 64, "context": 16, "layers": 2, "width": 16, "heads": 2, "mlp_width": 32}
    return LanguageModel(GPTConfig(**{**shape, **changes}), learning_rate=0.01, warmup_steps=1)


def llama(**changes: Any) -> LightningModule:
    return FineTuner(str(Path(sys.argv[2]) / "llama"), learning_rate=0.01, warmup_steps=1, **changes)


def resnet() -> LightningModule:
    return ImageClassifier(ResNet50(10), warmup_epochs=0, learning_rate=0.01)


MODELS: dict[str, tuple[Callable[[], LightningModule], Callable[[], Dataset[Any]]]] = {
    "two_kinds": (TwoKinds, rows),
    "gpt": (gpt, tokens),
    "rotary": (partial(gpt, positions="rotary"), tokens),
    "gpt_recomputing": (partial(gpt, checkpoint_activations=True), tokens),
    "resnet": (resnet, images),
    "llama": (llama, tokens),
    "lora": (partial(llama, lora_rank=2), tokens),
}


def fit(strategy: str, model: str, how: str, saves: bool = False, saved: Path | None = None) -> dict[str, Any]:
    """Train for some steps; or for an epoch, with a checkpoint at its end."""
    torch._dynamo.reset()
    counters.clear()
    seed_everything(1, verbose=False)
    make, data = MODELS[model]
    module, losses = make(), Losses()
    path = checkpoint(strategy, how)
    saving = ModelCheckpoint(path.parent, path.stem, save_on_train_epoch_end=True, enable_version_counter=False)
    strategy_of_ranks = STRATEGIES[strategy](compile=how, process_group_backend="gloo")
    trainer = quiet_trainer(
        strategy=strategy_of_ranks,
        devices=RANKS,
        use_distributed_sampler=False,
        callbacks=[losses, *([saving] if saves else [])],
        enable_checkpointing=saves,
        **({"max_epochs": 1} if saves else {"max_epochs": -1, "max_steps": STEPS}),
    )
    dataset, shared = data(), strategy in SHARES_BATCHES
    ranks, rank = (1, 0) if shared else (RANKS, int(os.environ["RANK"]))
    sampler = DistributedSampler(dataset, ranks, rank, shuffle=False)
    equal = strategy.startswith(("pipeline", "local_sgd", "diloco"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(dataset, BATCH, sampler=sampler, drop_last=equal), ckpt_path=saved)
    said = [str(each.message) for each in caught if "compiled" in str(each.message)]
    names = sorted(name for name, _ in module.named_parameters())
    return {"losses": losses.losses, "graphs": counters["stats"]["unique_graphs"], "names": names, "said": said}


def checkpoint(strategy: str, how: str) -> Path:
    return Path(sys.argv[2]) / f"{strategy}-{how}.ckpt"


def resume(strategy: str, model: str) -> dict[str, Any]:
    """An epoch one way, the rest the other way."""
    found: dict[str, Any] = {}
    for before, after in (("off", "off"), ("blocks", "off"), ("off", "blocks")):
        first = fit(strategy, model, before, saves=True)
        rest = fit(strategy, model, after, saved=checkpoint(strategy, before))
        found[f"{before}, {after}"] = first["losses"] + rest["losses"]
    return found


def main() -> None:
    torch.set_num_threads(1)
    torch.compiler.set_default_backend(sys.argv[1])
    results = {}
    for case in sys.argv[3:]:
        strategy, model, *resumes = case.split("/")
        found: dict[str, Any] = {how: fit(strategy, model, how) for how in ("off", "blocks")}
        results[case] = {**found, "resumed": resume(strategy, model) if resumes else {}}
    report(int(os.environ["RANK"]), **results)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
