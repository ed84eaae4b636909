"""A compiled training that is killed once its code is kept, or goes on to its end.

python tests/gpu/restarting.py OUTPUT ATTEMPT [--accelerator cuda]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from tests.gpu.compiling import STEPS, Losses, loader, make_module
from tests.gpu.matrix import make_trainer, prepare
from torch._dynamo.utils import counters

from azureml_strategy.strategies.compilation.cache import CompileCache

# torch's counters of graphs that its caches did not have.
_COMPILED = ("fxgraph_cache_miss", "fxgraph_cache_bypass", "autograd_cache_miss", "autograd_cache_bypass")


class Killed(Callback):
    """Ends the process as a machine does, after the last step, once the file is there."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step < STEPS:
            return
        while not self._file.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


class Noted(Losses):
    """Writes losses, and how many graphs were compiled and how many were found, after each step."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        counted = counters["inductor"] + counters["aot_autograd"]
        compiled = sum(counted[name] for name in _COMPILED)
        found = {"losses": list(map(float, self.losses)), "compiled": compiled, "found": counted["fxgraph_cache_hit"]}
        self._file.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("attempt", type=int, help="the first one, 0, is killed")
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    prepare()
    options.output.mkdir(parents=True, exist_ok=True)
    callbacks: list[Callback] = [Noted(options.output / f"{options.attempt}.json")]
    if options.attempt == 0:
        callbacks.append(Killed(options.output / "compile_cache" / "node0.bin"))
    trainer = make_trainer(
        *("azureml_ddp", "32-true", options.accelerator, {"compile": "blocks"}),
        **{"max_steps": STEPS, "limit_val_batches": 0, "default_root_dir": options.output},
        callbacks=[CompileCache(), *callbacks],
    )
    trainer.fit(make_module("gpt", options.output), loader("gpt"))


if __name__ == "__main__":
    main()
