"""A training of a compiled function, whose process is killed when its compiled code is kept, or not.

Arguments: the folder, the strategy, `killed`, `whole` or `taken` (it waits in the first attempt until its node is taken
away), and for each rank the factor that its function has.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tests.multiprocess.scripts.common import Regression, loader, quiet_trainer, report
from tests.multiprocess.scripts.strategies import STRATEGIES
from torch import Tensor
from torch._dynamo.utils import counters

from azureml_strategy import read_job

ROOT, STRATEGY, END, FACTORS = Path(sys.argv[1]), sys.argv[2], sys.argv[3], list(map(float, sys.argv[4:]))
RANK, NODES = int(os.environ["RANK"]), int(os.environ["AZUREML_NODE_COUNT"])
FACTOR = FACTORS[RANK % len(FACTORS)]


def bent(values: Tensor) -> Tensor:
    return torch.tanh(values) * FACTOR


class Compiled(Regression):
    def configure_model(self) -> None:
        self.bent = torch.compile(bent, dynamic=False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        rows, _ = batch
        loss = (self.bent(self.network(rows)) - rows.sum(dim=1, keepdim=True)).pow(2).mean()
        self.losses.append(float(loss.detach()))
        return loss


class Witness(Callback):
    """Notes what was compiled; ends its process, as a machine does, once each node's code is kept."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx != 4:
            return
        job = read_job()
        assert job is not None
        found = {kind: dict(counters[kind]) for kind in ("inductor", "aot_autograd")}
        report(
            RANK, attempt=job.attempt, folder=os.environ["TORCHINDUCTOR_CACHE_DIR"], losses=pl_module.losses, **found
        )
        while END == "taken" and job.attempt == 0:
            time.sleep(1)
        if END != "killed":
            return
        while not all((ROOT / "compile_cache" / f"node{node}.bin").exists() for node in range(NODES)):
            time.sleep(0.01)
        trainer.strategy.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    strategy = STRATEGIES[STRATEGY]()
    trainer = quiet_trainer(strategy=strategy, default_root_dir=ROOT, callbacks=[Witness()], max_steps=6)
    trainer.fit(Compiled(), loader(batch_size=4))
