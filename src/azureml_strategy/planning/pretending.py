"""This process believes that it is one rank of a job, and takes three steps: what of torch and Lightning that needs.

`begin` prepares it, in a process that has the variables of such a rank. What the rank holds goes into a file, and the
process ends there: nothing after the step runs, and nothing of a run is written.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from typing_extensions import override

from azureml_strategy.cluster.environ import NODE_COUNT, PRETEND_VARIABLE, LaunchError
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.import_hook import when_imported
from azureml_strategy.planning.held_state import gradient_bytes, held_state
from azureml_strategy.planning.layout import axes_of, buckets_of
from azureml_strategy.planning.pretended_group import BACKEND, register_pretended_groups
from azureml_strategy.planning.stage_messages import StageMessages
from azureml_strategy.planning.unwritten_tensors import UnwrittenTensors

# Lightning's own FSDP and DeepSpeed want the GPUs themselves, which are not here.
_WANTS_GPUS = ("accelerator='cpu'", "only supported on CUDA GPUs")
# What our strategies, data modules and Lightning raise where something does not fit: the sentence is for the user.
_SENTENCES = (MisconfigurationException, LaunchError, ValueError)
# Steps of the optimizer: DDP makes its buckets in the second one, and tells their sizes in the third.
_STEPS = 3


def begin(module: ModuleType | None = None) -> None:
    """Make this process a pretended rank, whatever it runs from now on.

    Args:
        module: that was just imported, for `when_imported`.
    """
    _answer_for_all()
    _take_steps()
    _load_in_this_process()
    when_imported("mlflow", _keep_store)
    when_imported("azureml_strategy.strategies.pipeline.strategy", StageMessages().install)
    when_imported("deepspeed.runtime.zero.utils", _agree)
    sys.excepthook = _report_error
    UnwrittenTensors().__enter__()


def report(**found: Any) -> None:
    """Write what was found into the file that this process was given, for whoever started it."""
    Path(os.environ[PRETEND_VARIABLE]).write_text(json.dumps(found), encoding="utf-8")


def report_error(error: BaseException) -> None:
    """Write why the step could not be taken, and whether the error's own sentence says it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    text = redact_text(" ".join(str(error).split())) or type(error).__name__
    told = isinstance(error, _SENTENCES) and not any(words in text for words in _WANTS_GPUS)
    report(error={"kind": type(error).__name__, "text": text, "where": where, "told": told})


def end() -> NoReturn:
    """End this process at once: handlers at its exit might write, or wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class ReportStep(Callback):
    """Reports what this rank holds after the steps of the optimizer, and ends the process."""

    def __init__(self) -> None:
        self._gradients = 0
        self._batch: list[list[int]] = []
        self._began = time.monotonic()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = [list(each.shape) for each in tree_leaves(batch) if isinstance(each, torch.Tensor)]

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._gradients = max(self._gradients, gradient_bytes(pl_module))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step < _STEPS:
            return
        strategy: Any = trainer.strategy
        report(
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            strategy=type(strategy).__name__,
            precision=str(trainer.precision),
            state=asdict(held_state(trainer, self._gradients)),
            parameters=sum(each.numel() for each in pl_module.parameters()),
            axes=axes_of(trainer),
            buckets=buckets_of(trainer),
            stages=getattr(strategy, "stage_sizes", []),
            batch=self._batch,
            seconds=round(time.monotonic() - self._began, 1),
        )
        end()


def _answer_for_all() -> None:
    """Let every process group be one that answers for all ranks."""
    register_pretended_groups()
    start, make = dist.init_process_group, dist.new_group

    @functools.wraps(start)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        given = {name: int(kwargs.get(name, -1)) for name in ("rank", "world_size")}
        rank, size = (each if each >= 0 else int(os.environ[name.upper()]) for name, each in given.items())
        start(BACKEND, store=FakeStore(), rank=rank, world_size=size)

    @functools.wraps(make)
    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return make(ranks, backend=BACKEND)

    def own_for_all(gathered: list[Any], own: Any, group: Any = None) -> None:
        gathered[:] = [own] * len(gathered)

    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]
        module.new_group = new_group  # type: ignore[attr-defined]
        module.all_gather_object = own_for_all  # type: ignore[attr-defined]
        module.broadcast_object_list = lambda *args, **kwargs: None  # type: ignore[attr-defined]
        module.gather_object = lambda own, gathered=None, *args, **kwargs: (  # type: ignore[attr-defined]
            None if gathered is None else own_for_all(gathered, own)
        )
        module.barrier = lambda *args, **kwargs: None  # type: ignore[attr-defined]
        module.monitored_barrier = lambda *args, **kwargs: None  # type: ignore[attr-defined]


def _take_steps() -> None:
    """Let every Trainer train on CPUs for three steps, and record nothing."""
    make = Trainer.__init__

    @functools.wraps(make)
    def init(self: Trainer, *args: Any, **kwargs: Any) -> None:
        kwargs["fast_dev_run"] = _STEPS * int(kwargs.get("accumulate_grad_batches") or 1)
        kwargs["accelerator"] = "cpu"
        if not isinstance(kwargs.get("devices"), int) or kwargs["devices"] < 1:
            kwargs["devices"] = int(os.environ["WORLD_SIZE"]) // int(os.environ[NODE_COUNT])
        kwargs["callbacks"] = [*_as_list(kwargs.get("callbacks")), ReportStep()]
        make(self, *args, **kwargs)
        kept = [each for each in self.callbacks if not isinstance(each, Checkpoint)]  # type: ignore[attr-defined]
        self.callbacks = kept  # type: ignore[attr-defined]
        self.limit_val_batches = 0
        # `fast_dev_run` ends with the first epoch, and a rank's share of a small data set may be a single batch.
        self.fit_loop.max_epochs = _STEPS

    Trainer.__init__ = init  # type: ignore[method-assign]


def _as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _load_in_this_process() -> None:
    """Let loaders read here: their processes would make and send numbers for nothing."""
    make: Callable[..., None] = DataLoader.__init__

    @functools.wraps(make)
    def init(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "pin_memory"):
            kwargs.pop(name, None)
        make(self, dataset, *args, **kwargs)

    DataLoader.__init__ = init  # type: ignore[method-assign]


def _keep_store(mlflow: Any) -> None:
    """Keep a script from naming another store than that of the pretended job."""
    mlflow.set_tracking_uri = lambda uri: None


def _agree(module: Any) -> None:
    """Let ZeRO compare no numbers with those of rank 0, which is not there."""
    module.assert_lst_len_same_as_other_ranks = lambda numbers: None
    module.assert_ints_same_as_other_ranks = lambda numbers: None


def _report_error(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    report_error(error)
    traceback.print_exception(kind, error, where)
    end()
