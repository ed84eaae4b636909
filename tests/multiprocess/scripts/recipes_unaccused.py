"""The recipes' models trained as they should be: what is said of their copies and updates."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from tests.multiprocess.scripts.common import quiet_trainer, report
from tests.multiprocess.scripts.strategies import tiny_gpt
from torch import nn
from torch.utils.data import DataLoader

from azureml_strategy.models import Bottleneck, FineTuner, GPTConfig, ImageClassifier, LanguageModel
from azureml_strategy.strategies import AzureMLDDPStrategy, AzureMLLocalSGDStrategy, AzureMLModelParallelStrategy

WORLD = int(os.environ["WORLD_SIZE"])
STEPS, LENGTH, VOCABULARY = 6, 8, 32
ROWS = STEPS * 2 * WORLD


def tokens() -> list[Any]:
    drawn = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return [(row[:-1], row[1:]) for row in drawn]


def images() -> list[Any]:
    drawn = torch.randint(0, 256, (ROWS, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return [(image, number % 3) for number, image in enumerate(drawn)]


def resnet(warmup_epochs: float) -> LightningModule:
    """Its blocks without the depth; the last scale of each begins at 0 if there is a warm-up."""
    torch.manual_seed(0)
    stem = (nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    blocks = (Bottleneck(8, 4, 1), Bottleneck(16, 4, 2))
    if warmup_epochs:
        for each in blocks:
            nn.init.zeros_(each.bn3.weight)
    network = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))
    return ImageClassifier(network, warmup_epochs=warmup_epochs)


def gpt2() -> LightningModule:
    """It has biases of keys, whose gradients are rounding alone."""
    shape = GPTConfig(
        *(VOCABULARY, LENGTH, 2, 16, 2, 32), norm="layernorm", positions="learned", mlp="gelu", bias=True, dropout=0.1
    )
    return LanguageModel(shape, learning_rate=1e-3, warmup_steps=4, seed=3)


MODELS: dict[str, tuple[Callable[[], LightningModule], Callable[[], list[Any]]]] = {
    "resnet": (partial(resnet, 0), images),
    "resnet, warming up": (partial(resnet, 1), images),
    "gpt": (tiny_gpt, tokens),
    "gpt2": (gpt2, tokens),
    "fine-tuned": (lambda: FineTuner(sys.argv[1], warmup_steps=4), tokens),
    "adapters": (lambda: FineTuner(sys.argv[1], lora_rank=2, lora_dropout=0.1), tokens),
}
OTHERS: dict[str, Callable[[], Strategy]] = {
    "local sgd": lambda: AzureMLLocalSGDStrategy(period=4),
    "model parallel": lambda: AzureMLModelParallelStrategy(tensor_parallel_size=2),
}


def main() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("azureml_strategy").addHandler(handler)
    cases: list[tuple[str, Callable[[], Strategy]]] = [(name, AzureMLDDPStrategy) for name in MODELS]
    cases += [("gpt", make) for make in OTHERS.values()] if WORLD > 1 else []
    said: dict[str, list[str]] = {}
    steps: dict[str, int] = {}
    rank = 0
    for name, make_strategy in cases:
        module, rows = (make() for make in MODELS[name])
        trainer = quiet_trainer(strategy=make_strategy(), devices=WORLD, max_epochs=1, max_steps=STEPS)
        trainer.fit(module, DataLoader(rows, batch_size=2))
        case = f"{name} under {type(trainer.strategy).__name__}"
        said[case] = [each for each in lines if "REPLICA_CHECK" in each]
        rank, steps[case] = trainer.global_rank, trainer.global_step
        lines.clear()
    report(rank, said=said, steps=steps)


if __name__ == "__main__":
    main()
