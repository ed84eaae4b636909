"""Trainings whose communication is tuned before the first step, and the same ones without that."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import SAMPLES, Rows, parameters, report
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from azureml_strategy.strategies import AzureMLDDPStrategy
from azureml_strategy.strategies.errors import ConfigurationError

RANK = int(os.environ["RANK"])
FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()
# A message for each of 41 layers: far slower than any other choice, on any machine.
SLOW_MB = 0.0001
SLOW: dict[str, Any] = {"bucket_cap_mb": SLOW_MB}


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.rows = Rows().rows

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"row": self.rows[index], "index": torch.tensor(index)}


class Deep(LightningModule):
    """40 layers with dropout and statistics, whose step draws random numbers and takes its batch apart.

    One more layer is used by no step.
    """

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(40)]
        self.network = nn.Sequential(nn.BatchNorm1d(8), *layers, nn.Dropout(0.2), nn.Linear(8, 1))
        self.unused = nn.Linear(8, 1)
        self.seen: list[Any] = []
        self.calls = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        self.calls += 1
        rows = batch.pop("row")
        rows.mul_(1 + 0.1 * random.random()).add_(float(np.random.rand())).add_(torch.rand(()))
        loss = self.network(rows).squeeze(1).sub(rows.sum(1)).pow(2).mean()
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.seen.append([loss.item(), batch["index"].tolist()])
        return {"loss": loss}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Holder(Callback):
    """Keeps the Trainer's model, as a callback of a user's may."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.held = trainer.model

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        assert isinstance(model, DistributedDataParallel)
        self.bucket_bytes = model.bucket_bytes_cap


def train(kind: type[LightningModule] = Deep, **arguments: Any) -> dict[str, Any]:
    """What a training of a few steps was like."""
    precision = arguments.pop("precision", "32-true")
    steps = arguments.pop("steps", 6)
    folder = FOLDER / arguments.pop("folder", "unused")
    seed_everything(3, verbose=False)
    module = kind()
    strategy = AzureMLDDPStrategy(**arguments)
    holder = Holder()
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=steps,
        precision=precision,
        callbacks=[holder],
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=1,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(Samples(), batch_size=4, shuffle=True))
    tuning = strategy.tuning
    return {
        "seen": getattr(module, "seen", None),
        "calls": getattr(module, "calls", None),
        "parameters": parameters(module),
        "statistics": [each.tolist() for each in module.buffers()],
        "random": [torch.rand(3).tolist(), random.random(), float(np.random.rand())],
        "logged": float(trainer.callback_metrics["loss_epoch"]) if "loss_epoch" in trainer.callback_metrics else None,
        "pick": asdict(tuning.pick) if tuning else None,
        "why": tuning.why if tuning else None,
        # The time of day counts whole seconds, in which a second measurement may begin.
        "measured": [tuning.measured, *tuning.alone_s] if tuning else None,
        "passes": tuning.steps if tuning else None,
        "rows": len(tuning.rows) if tuning else None,
        "bucket_bytes": holder.bucket_bytes,
        "held": isinstance(holder.held, DistributedDataParallel),
        "metrics": csv(folder) if RANK == 0 else None,
        "warnings": [str(each.message) for each in warned],
    }


def csv(folder: Path) -> str:
    file = folder / "metrics.csv"
    return file.read_text() if file.exists() else ""


def tuned(**arguments: Any) -> dict[str, Any]:
    """A tuned training that has picked something: on a busy machine a search may find that all may be chance."""
    for attempt in range(8):
        run = train(**SLOW, tune=True, **arguments)
        if run["pick"]["bucket_cap_mb"] != SLOW_MB or attempt == 7:
            return run
        if RANK == 0:
            for file in FOLDER.rglob("*.json"):
                if file.name in ("tuned_ddp.json", "mine.json") and arguments.get("folder", "named") in file.parts:
                    file.unlink()
    raise AssertionError


def exact() -> dict[str, Any]:
    """Tuned and untuned; then from the file, and after a restart."""
    return {
        "untuned": train(**SLOW),
        "tuned": tuned(folder="tuned"),
        "restarted": train(**SLOW, tune=True, folder="tuned"),
        "read": train(**SLOW, tuned=str(FOLDER / "tuned" / "tuned_ddp.json")),
        "otherwise": train(tune=True, folder="tuned"),
    }


def exact_more() -> dict[str, Any]:
    """With a file of another name, and in half precision."""
    return {
        **exact(),
        "named": tuned(tuned=str(FOLDER / "named" / "mine.json")),
        "half untuned": train(**SLOW, precision="bf16-mixed"),
        "half tuned": tuned(precision="bf16-mixed", folder="half"),
    }


def compressed() -> dict[str, Any]:
    """PowerSGD with many buckets under way, and a search in which compression may be picked."""
    return {
        "powersgd": train(gradient_compression="powersgd", bucket_cap_mb=0.001, steps=14),
        "searched": tuned(tune_lossy="bf16", tune_static_graph=True, folder="lossy"),
    }


class Straggler(Deep):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        if RANK == 1:
            time.sleep(0.3)
        return super().training_step(batch, batch_idx)


class Locked(Deep):
    """Cannot be copied on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock() if RANK == 1 else None


class Bound(Deep):
    """Its step belongs to the module that was made, whatever copies are made of it."""

    def __init__(self) -> None:
        super().__init__()
        network = [self.network]
        self.step = lambda rows: network[0](rows)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"loss": self.step(batch["row"]).pow(2).mean()}


class Manual(Deep):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx)["loss"])
        optimizer.step()


class Failing(Deep):
    """Fails in a trial on one rank: not before the trials with communication, while the others wait in a collective."""

    rank, place, kind = 1, "forward", RuntimeError

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        output = super().training_step(batch, batch_idx)
        # A copy has other calls than the original, which the trials leave alone. Five are without communication.
        if self.rank == RANK and self.calls > 8:
            if self.place == "forward":
                raise self.kind("no memory\nfor this")
            output["loss"].register_hook(self.fail)
        return output

    def fail(self, gradient: Tensor) -> None:
        raise self.kind("no memory\nfor this")


class FailingInBackward(Failing):
    rank, place, kind = 0, "backward", torch.OutOfMemoryError


class FailingAtOnce(Failing):
    """Without communication already, on all ranks."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        assert not isinstance(self.log, type(tuned)), "this is a trial"
        return super(Failing, self).training_step(batch, batch_idx)


def failing() -> dict[str, Any]:
    """A trial that fails leaves the training as it would have been."""
    kinds = (Failing, FailingInBackward, FailingAtOnce)
    found = {kind.__name__: train(kind, tune=True, folder=kind.__name__) for kind in kinds}
    found["untuned"] = train()
    # The process group of the training is whole.
    found["tuned"] = train(tune=True, folder="afterwards")
    return found


# As a file that was measured on longer rows.
OTHER = {"batch": "float32 [9, 8], int64 [9]"}


def refused() -> dict[str, Any]:
    """Modules that cannot be measured train as they are; files that do not fit end the run."""
    found: dict[str, Any] = {
        kind.__name__: train(kind, tune=True, folder=kind.__name__) for kind in (Straggler, Locked, Bound, Manual)
    }
    found["files"] = sorted(each.name for each in FOLDER.rglob("*.json"))
    train(tune=True, tuned=str(FOLDER / "given.json"))
    for name, value in {"world_size": 64, "model": "Other 1", "devices": "2 x H100", "precision": "x", **OTHER}.items():
        file = FOLDER / f"{name}.json"
        if RANK == 0:
            content = json.loads((FOLDER / "given.json").read_text())
            content["conditions"][name] = value
            file.write_text(json.dumps(content))
        try:
            train(tuned=str(file))
        except ConfigurationError as error:
            found[name] = str(error)
    if RANK == 0:
        (FOLDER / "again").mkdir()
        (FOLDER / "batch.json").rename(FOLDER / "again" / "tuned_ddp.json")
    found["again"] = train(tune=True, folder="again", steps=2)
    return found


CASES = {"exact": exact, "exact_more": exact_more, "compressed": compressed, "refused": refused, "failing": failing}

if __name__ == "__main__":
    report(RANK, **CASES[sys.argv[1]]())
