"""All ranks end at the same step when any of them is told to end."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from itertools import count
from types import FrameType
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from typing_extensions import override

from azureml_strategy.checkpoint.agreement import StopAgreement

# What a shell reports for a process ended by SIGTERM: Azure ML must not take the job for completed.
EXIT_CODE = 128 + signal.SIGTERM
_STORE_TIMEOUT = timedelta(minutes=2)
# Each fit has keys of its own in the store; all ranks count the same fits.
_fits = count()


class TerminateTogether(Callback):
    """Turns SIGTERM on any rank into an orderly end of all ranks, after the same batch and with exit code 143.

    Stock Lightning broadcasts from rank 0 inside the signal handler: a signal to another rank breaks the group, and
    one to rank 0 ends all of them with exit code 0. Here the handler only notes the signal, and the ranks agree on a
    batch to stop after. Callbacks then see an exception on every rank, so that checkpoints on exception and loggers
    work as for any other.
    """

    def __init__(self) -> None:
        self._requested = False
        self._agreement: StopAgreement | None = None

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()
        fit = next(_fits)
        if trainer.world_size > 1 and dist.is_initialized():
            store = PrefixStore(f"azureml_strategy/stop/{fit}", _rendezvous_store())
            self._agreement = StopAgreement(store, trainer.global_rank, trainer.world_size)
            if self._requested:
                self._agreement.ask()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        agreement = self._agreement
        if agreement.step_done() if agreement is not None else self._requested:
            self._requested = False
            raise SIGTERMException(EXIT_CODE)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None
        if self._requested and stage == "fit":
            # It came too late to agree on. Lightning has put the original handler back: that one ends the process.
            self._requested = False
            signal.raise_signal(signal.SIGTERM)

    def _listen(self) -> None:
        """Replace Lightning's handler, which it put in place just before and removes at the end."""
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._requested = True
        if self._agreement is not None:
            self._agreement.ask()


def _rendezvous_store() -> Store:
    """A connection of our own to the store through which the ranks found one another."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)
