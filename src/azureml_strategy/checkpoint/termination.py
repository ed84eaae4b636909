"""All ranks end at the same step when any of them is told to end."""

from __future__ import annotations

import logging
import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

log = logging.getLogger(__name__)
# What a shell reports for a process ended by SIGTERM: Azure ML must not take the job for completed.
EXIT_CODE = 128 + signal.SIGTERM


class TerminateTogether(Callback):
    """Turns SIGTERM on any rank into an orderly end of all ranks, after the same batch and with exit code 143.

    Stock Lightning broadcasts from rank 0 inside the signal handler: a signal to another rank breaks the group, and
    one to rank 0 ends all of them with exit code 0. Here the handler only notes the signal. After each batch the
    ranks sum their notes over a gloo group of their own, without waiting: the sum is read one batch later, when it
    has long arrived. Callbacks then see an exception on every rank, so that checkpoints on exception and loggers
    work as for any other.
    """

    def __init__(self) -> None:
        self._requested = False
        self._group: dist.ProcessGroup | None = None
        self._sum = torch.zeros(1)
        self._work: dist.Work | None = None

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()
        if trainer.world_size > 1 and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._agreed():
            raise SIGTERMException(EXIT_CODE)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._work is not None:
            self._work.wait()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self.__init__()  # type: ignore[misc]  # ready for the next fit

    def _listen(self) -> None:
        """Replace Lightning's handler, which it put in place just before; it restores the original one at the end."""
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._requested = True

    def _agreed(self) -> bool:
        """Whether any rank had been told to end by its previous batch; the same answer on all ranks."""
        if self._group is None:
            return self._requested
        agreed = False
        if self._work is not None:
            self._work.wait()
            agreed = bool(self._sum.item())
        self._sum = torch.tensor([float(self._requested)])
        self._work = dist.all_reduce(self._sum, group=self._group, async_op=True)
        return agreed
