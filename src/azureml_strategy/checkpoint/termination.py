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
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from typing_extensions import override

from azureml_strategy.checkpoint.agreement import StopAgreement
from azureml_strategy.cluster.launchers import local

# What a shell reports for a process ended by SIGTERM: Azure ML must not take the job for completed.
EXIT_CODE = 128 + signal.SIGTERM
_STORE_TIMEOUT = timedelta(seconds=60)
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
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        fit = next(_fits)
        if trainer.world_size > 1 and dist.is_initialized():
            store = _rendezvous_store()
            if store is None:
                return
            store = PrefixStore(f"azureml_strategy/stop/{fit}", store)
            self._agreement = StopAgreement(store, trainer.global_rank, trainer.world_size)
            if self._requested:
                self._agreement.ask()
        self._listen()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        agreement = self._agreement
        if agreement.step_done() if agreement is not None else self._requested:
            self._requested = False
            raise SIGTERMException(_exit_code(trainer))

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()  # Lightning calls no teardown then

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()
        if self._requested and stage == "fit":
            # It came too late to agree on. Lightning has put the original handler back: that one ends the process.
            self._requested = False
            signal.raise_signal(signal.SIGTERM)

    def _close(self) -> None:
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None

    def _listen(self) -> None:
        """Replace Lightning's handler, which it put in place just before and removes at the end."""
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._requested = True
        if self._agreement is not None:
            self._agreement.ask()


def _exit_code(trainer: Trainer) -> int:
    """0 in the processes that a strategy started: Lightning kills their parent at once when one ends otherwise."""
    return 0 if local.MARKER in os.environ and trainer.local_rank > 0 else EXIT_CODE


def _rendezvous_store() -> Store | None:
    """A connection of our own to the store through which the ranks found one another; None where there is none."""
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)
    except (KeyError, RuntimeError) as error:
        rank_zero_warn(
            f"The ranks cannot agree on a step to stop at after SIGTERM ({error!r}): the process group was not made "
            "with MASTER_ADDR and MASTER_PORT. Training goes on; SIGTERM does what it does in stock Lightning."
        )
        return None
