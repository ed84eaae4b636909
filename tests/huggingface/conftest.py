"""Training in this process, under a strategy of ours, with tiny models of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.emulated import free_port
from torch import Tensor
from torch.utils.data import DataLoader

from azureml_strategy.strategies import AzureMLDDPStrategy

TOKENS = torch.randint(0, 96, (8, 7), generator=torch.Generator().manual_seed(1))
Fit = Callable[..., Trainer]
Save = Callable[..., Path]


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fit]:
    """Train two steps in a process group of one."""
    port = str(free_port())
    for name, value in {"LOCAL_RANK": "0", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE"):  # which DeepSpeed sets, and nobody takes back
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)

    def train(
        module: LightningModule, strategy: Any = None, callbacks: Any = (), ckpt_path: Any = None, **arguments: Any
    ) -> Trainer:
        trainer = Trainer(
            accelerator="cpu", devices=1, logger=False, callbacks=list(callbacks), enable_progress_bar=False,
            enable_model_summary=False, strategy=strategy or AzureMLDDPStrategy(find_unused_parameters=True),
            **{"max_steps": 2, **arguments},
        )  # fmt: skip
        trainer.fit(module, DataLoader(list(TOKENS), batch_size=2), ckpt_path=ckpt_path)
        return trainer

    yield train
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def save(fit: Fit, tmp_path: Path) -> Save:
    """Train, and save with Lightning's own ModelCheckpoint."""

    def train(module: LightningModule, strategy: Any = None, **arguments: Any) -> Path:
        saving = ModelCheckpoint(tmp_path / "checkpoints", filename="last", **arguments)
        fit(module, strategy, [saving])
        return Path(saving.best_model_path)

    return train


def logits(model: Any) -> Tensor:
    """What a model says of all the data."""
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=TOKENS).logits
    return found
