"""Callbacks for recipes that are run on a GPU: each looks at what no test of a CPU can see.

azureml-strategy train gpt_ddp "callbacks={watch:{_target_:tests.gpu.watching.Recorder,path:here.json}}"
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import warnings
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from tests.gpu.launch_waits import SPANS, launch_waits
from tests.synchronisations import where
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from azureml_strategy.tracking.timing.throughput import find_throughput


class NoSynchronisation(Callback):
    """Has torch name what makes the host wait for the GPU: in some steps, all between them, and evaluations.

    The steps must log nothing: a metric that is logged is read, and that waits. It prints each line that waits.

    Args:
        first: the first step, of which something may yet be allocated or compiled before.
        steps: how many.

    Raises:
        RuntimeError: something waits that is not DeepSpeed's; or the training was too short to tell.
    """

    def __init__(self, first: int = 8, steps: int = 12) -> None:
        super().__init__()
        self._steps = range(first, first + steps)
        self._watched = 0
        self._found: Counter[str] = Counter()
        self._warnings = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._warnings.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("always", message=_SYNCHRONISING)
        show = warnings.showwarning

        def note(message: Any, *arguments: Any, **named: Any) -> None:
            if _SYNCHRONISING in str(message):
                self._found[where(__file__, warnings.__file__)] += 1
            else:
                show(message, *arguments, **named)

        warnings.showwarning = note

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        _watch(pl_module, batch_idx in self._steps)
        self._watched += batch_idx in self._steps

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        _watch(pl_module, batch_idx > 0)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        _watch(pl_module, False)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(pl_module)
        if self._watched < len(self._steps):
            raise RuntimeError(f"{self._watched} of {len(self._steps)} steps were watched: the training was too short.")
        for line, times in self._found.items():
            print(f"waits for the GPU, {times} times: {line}", flush=True)
        if any("deepspeed/" not in line.partition(",")[0] for line in self._found):
            raise RuntimeError("something waits for the GPU")

    def _end(self, module: LightningModule) -> None:
        _watch(module, False)
        self._warnings.close()


_SYNCHRONISING = "called a synchronizing CUDA operation"


def _watch(module: LightningModule, watched: bool) -> None:
    if module.device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn" if watched else "default")


class Recorder(Callback):
    """Notes each loss as it was to the last bit, and what weights and metrics were at the end.

    Args:
        path: of a JSON file.
        die_at: a batch after which the process is killed, as by a machine that is taken away.
    """

    def __init__(self, path: str, die_at: int | None = None) -> None:
        super().__init__()
        self._path, self._die_at = Path(path).absolute(), die_at
        self._losses: dict[int, str] = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._losses[trainer.global_step] = float(outputs["loss"]).hex()
        if self._die_at is not None and trainer.global_step == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weights = hashlib.sha256()
        for parameter in pl_module.parameters():
            weights.update(_of_this_rank(parameter).flatten().view(torch.uint8).cpu().numpy().tobytes())
        if trainer.is_global_zero:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            told = {"losses": self._losses, "weights": weights.hexdigest(), "metrics": metrics}
            self._path.write_text(json.dumps(told))


def _of_this_rank(parameter: Any) -> Tensor:
    """Return this rank's part of a parameter that FSDP2 or ZeRO-3 has cut, or the whole one."""
    part: Tensor = (
        parameter.to_local() if hasattr(parameter, "to_local") else getattr(parameter, "ds_tensor", parameter)
    )
    return part.detach().contiguous()


class Annotations(Profiler):
    """A Trainer's profiler that marks forward and backward in whatever torch.profiler records."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override] # not a generator
        return record_function(action_name) if SPANS.fullmatch(action_name) else nullcontext()

    def start(self, action_name: str) -> None:
        """Do nothing: forward and backward are no such actions."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""


class LaunchWaits(Callback):
    """Writes what the breakdown says of some steps, and what torch.profiler has seen of the same ones.

    To record slows the host down, and so both see a host that is as slow.

    Args:
        path: of a JSON file.
        last: the last step, counted from 1, of a window that is logged.
        steps: how many steps the window has.
    """

    def __init__(self, path: str, last: int, steps: int) -> None:
        super().__init__()
        self._path, self._first, self._last = Path(path).absolute(), last - steps, last
        self._profile: profile | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step not in (self._first, self._last):
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        if self._profile is not None:
            self._profile.stop()
            return
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self._profile.start()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        throughput = find_throughput(trainer)
        if trainer.global_step != self._last or self._profile is None or throughput is None:
            return
        trace = self._path.with_suffix(".trace")
        self._profile.export_chrome_trace(str(trace))
        told = dict(throughput.latest.shares) if throughput.latest else {}
        self._path.write_text(json.dumps({"told": told, "seen": launch_waits(json.loads(trace.read_text()))}))
