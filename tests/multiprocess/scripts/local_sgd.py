"""What two replicas train, case by case, for an oracle that computes the same in one process; and bytes sent."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import quiet_trainer, report
from lightning.pytorch import Callback, LightningModule, Trainer
from local_sgd_cases import CASES, CHOSEN, OUTER
from own_sockets import own_connections
from replicas import Case, Notes, train, train_ddp
from torch import Tensor, nn
from torch.utils.data import DataLoader
from two_layers import TwoLayers

from azureml_strategy.strategies import AzureMLDDPStrategy, AzureMLLocalSGDStrategy
from azureml_strategy.strategies.local_sgd import fragments as parts

# struct tcp_info in linux/tcp.h: tcpi_bytes_sent.
_BYTES_SENT_AT = 200
PUBLISHED = Path(__file__).parents[2] / "strategies" / "local_sgd" / "fixtures" / "torchft_diloco.json"


def numbers() -> dict[str, Any]:
    """Each case, and some again with fragments that are too large for one exchange."""
    names, in_parts = CHOSEN[sys.argv[1]]
    found = {name: train(CASES[name]) for name in names}
    with patch.object(parts, "_MOST_ELEMENTS", 7):
        return {**found, **{f"{name}, in parts": train(CASES[name]) for name in in_parts}}


def equalities() -> dict[str, Any]:
    """Pairs of trainings that must be the same."""
    plain = Case({"period": 1}, {"max_steps": 20, "max_epochs": -1})
    adamw: dict[str, Any] = {"optimizer": torch.optim.AdamW, "learning_rate": 0.02, "schedule": 5}
    same = Case({"period": 4}, {"gradient_clip_val": 0.5}, adamw, same_rows=True)
    return {
        "every step": train(plain),
        "ddp": train_ddp(plain),
        "same rows": train(same),
        "all in warm-up": train(Case({"period": 4, "warmup_steps": 12}, {}, adamw)),
        "ddp, adamw": train_ddp(Case({}, {}, adamw)),
    }


def torchft() -> dict[str, Any]:
    """Each case that torchft has published, with its weights before each step."""
    return {"histories": [two_layers(each["delay"], each["mixing"]) for each in json.loads(PUBLISHED.read_text())]}


def two_layers(delay: int, mixing: float) -> list[list[float]]:
    notes = Notes()
    outer = {"outer_learning_rate": 2.0, "outer_momentum": 0.0}
    strategy = AzureMLLocalSGDStrategy(period=6, fragments=2, delay=delay, mixing=mixing, **outer)
    trainer = quiet_trainer(strategy=strategy, max_steps=15, max_epochs=-1, callbacks=[notes])
    trainer.fit(TwoLayers(), DataLoader([(torch.zeros(1), torch.tensor(row)) for row in range(30)], batch_size=1))
    return notes.weights


class Wide(LightningModule):
    """With enough parameters that nothing else counts among the bytes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Sent(Callback):
    """Bytes that this process has sent to other ranks, by the kernel's count, when each step has ended."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if not self.bytes:
            self.bytes.append(bytes_sent())

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.bytes.append(bytes_sent())


def bytes_sent() -> int:
    """Over all connections of this process except those of the rendezvous store."""
    store = int(os.environ["MASTER_PORT"])
    return sum(_of_connection(each.socket) for each in own_connections() if store not in each.ports)


def _of_connection(connection: socket.socket) -> int:
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(struct.unpack_from("=Q", information, _BYTES_SENT_AT)[0])


def sent(strategy: Any) -> list[int]:
    counted = Sent()
    trainer = quiet_trainer(strategy=strategy, max_steps=32, max_epochs=-1, callbacks=[counted])
    trainer.fit(Wide(), DataLoader(torch.randn(512, 8, generator=torch.Generator().manual_seed(1)), batch_size=4))
    return counted.bytes


def traffic() -> dict[str, Any]:
    return {
        "ddp": sent(AzureMLDDPStrategy()),
        "plain": sent(AzureMLLocalSGDStrategy(period=16)),
        "outer": sent(AzureMLLocalSGDStrategy(period=16, **OUTER)),
        "fragments": sent(AzureMLLocalSGDStrategy(period=16, fragments=4, delay=2)),
        "bf16": sent(AzureMLLocalSGDStrategy(period=16, compression="bf16")),
        "int8": sent(AzureMLLocalSGDStrategy(period=16, compression="int8")),
    }


PARTS = {"numbers": numbers, "equalities": equalities, "torchft": torchft, "traffic": traffic}
results = {name: PARTS[name]() for name in sys.argv[2:]}
report(torch.distributed.get_rank(), **results)
torch.distributed.destroy_process_group()
