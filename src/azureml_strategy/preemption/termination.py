"""After SIGTERM or a Scheduled Event, stops all ranks after the same step, saves, and ends them or goes on."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from azureml_strategy.checkpoint.job_checkpoint import JobCheckpoint
from azureml_strategy.checkpoint.loop_progress import FitLoopState
from azureml_strategy.cluster.environ import TERMINATION_SWITCH
from azureml_strategy.cluster.isolation import CapturedResult, IsolatedCallback, run_user_code
from azureml_strategy.cluster.job import read_job
from azureml_strategy.cluster.launchers import detect_ranks, local
from azureml_strategy.control.agreement import State, StopAgreement, StopBarrier
from azureml_strategy.control.gather import gather, open_shared_store
from azureml_strategy.control.store import ControlStore
from azureml_strategy.interfaces import RunLogger, paused
from azureml_strategy.lightning_internals import (
    SubprocessScriptLauncher,
    original_handler,
    replace_sigterm_broadcast,
    replace_sigterm_notifier,
    restore_sigterm,
    signal_connector_of,
)
from azureml_strategy.preemption.scheduled_events import EventPoller, events_url

log = logging.getLogger(__name__)

# A tracking server that does not answer must not use up the 30 seconds that Azure gives a low-priority node.
_FLUSH_SECONDS = 8.0

# As in a shell, the exit code is this plus the number of the signal. Azure ML must not take the job for completed.
_OF_SIGNAL = 128
# If a signal is the reason to stop, the reason begins with this name.
_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
_ON_CTRL_C = b"\nCtrl-C: stopping after one of the next steps, to save. Press it again to end at once.\n"
_NO_STORE = (
    "The ranks cannot agree on a step to stop at after SIGTERM: the process group was not made with MASTER_ADDR and "
    "MASTER_PORT, or nothing answers there. Training goes on; SIGTERM does what it does in stock Lightning."
)


def save_and_record(trainer: Trainer, reason: str) -> None:
    """Save a checkpoint on all ranks together, and write the reason into the run and to the console.

    All ranks call it between the same two steps, with the same reason. Each `JobCheckpoint` saves, and so does every
    other checkpoint callback that saves on an exception.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, JobCheckpoint):
            callback.save_now(trainer, reason)
        else:
            callback.on_exception(trainer, trainer.lightning_module, SIGTERMException(reason))
    _record(trainer, f"{reason}, after step {trainer.global_step}")


def _record(trainer: Trainer, text: str) -> None:
    """Write one tag per attempt of the job, such as `stopped.attempt_0`."""
    if trainer.is_global_zero:
        log.warning("All ranks have stopped: %s", text)
    job = read_job()
    for logger in trainer.loggers:
        if isinstance(logger, RunLogger):
            logger.log_tags({f"stopped.attempt_{job.attempt if job else 0}": text})
            logger.flush(_FLUSH_SECONDS)


class TerminateTogether(IsolatedCallback):
    """Stops all ranks after the same step, saves, and ends them with exit code 143, or goes on.

    Two things stop the ranks: SIGTERM on any rank, and a Scheduled Event for any node. Azure gives a low-priority node
    at least 30 seconds. In both cases the ranks agree on a step, save together with every checkpoint callback that
    saves on an exception, and write the reason into the MLflow run. After SIGTERM they then end. After an event they
    wait until their node is taken away, because a job whose process exits counts as completed. If the event is
    withdrawn, training goes on.

    Stock Lightning broadcasts from rank 0 inside the signal handler. A signal to another rank breaks the group, and one
    to rank 0 ends all ranks with exit code 0. Each step also begins with a broadcast that GPUs have to wait for. Here
    the handler only notes the signal, and there is no broadcast. When the ranks end, callbacks see an exception on
    every rank, so loggers work as for any other exception.

    The script's own handlers, set before or during the `fit`, are called after the ranks have stopped and saved, on the
    rank that got the signal. A handler set during the `fit` acts alone until the end of that step.
    `trainer.received_sigterm` is true on all ranks from a stop by SIGTERM on; after an event, once the ranks end.

    Python catches signals on the main thread only. A `fit` on another thread stops only for events. SIGTERM ends its
    process, as in stock Lightning.

    Every Trainer of a job has this callback. If a Trainer has several, the first one acts, so your own replaces it.

    Args:
        events_url: address to poll for Scheduled Events. By default AZUREML_STRATEGY_SCHEDULED_EVENTS, or Azure's own
            address on an Azure VM. `off` turns polling off.
        notice_s: how long before an event the ranks stop, in seconds.
        patience_s: how long after the time of an event the ranks wait for it before they go on, in seconds.
        poll_s: pause between two polls for events, in seconds. One process of each node polls.
        agree_s: pause between two checks whether a rank wants to stop, in seconds.
        ctrl_c: whether Ctrl-C stops the ranks as SIGTERM does, with exit code 130. A second Ctrl-C ends the processes
            at once.
    """

    switch = TERMINATION_SWITCH

    def __init__(
        self,
        events_url: str | None = None,
        notice_s: float = 60.0,
        patience_s: float = 120.0,
        poll_s: float = 1.0,
        agree_s: float = 0.5,
        ctrl_c: bool = False,
    ) -> None:
        self._events_url = events_url
        self._times = (notice_s, patience_s, poll_s)
        self._agree_s = agree_s
        self._ctrl_c = ctrl_c
        self._requested: signal.Signals | None = None
        self._rank = 0
        self._stops = 0
        self._replaced: list[Any] = []
        self._calling: list[Any] = []
        self._store: ControlStore | None = None
        self._agreement: StopAgreement | None = None
        self._events: EventPoller | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if stage != "fit" or next(each for each in callbacks if isinstance(each, TerminateTogether)) is not self:
            return
        # If this fails on one rank, the others must not wait for it. To open the store is a collective, which fails at
        # once if another rank has ended.
        ready = CapturedResult(lambda: self._prepare(trainer))
        shared = open_shared_store("TerminateTogether", trainer.global_rank, trainer.world_size, ready.fault is None)
        if ready.fault is not None or shared.store is None or not all(shared.values):
            if shared.store is not None:
                shared.store.close()
            elif dist.is_initialized():
                rank_zero_warn(_NO_STORE)
            ready.reraise()
            return
        self._store = shared.store
        self._rank = trainer.global_rank
        self._stops = 0  # the same on all ranks, even if an earlier fit has failed on one
        self._listen_with_lightning(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._store is None:
            return
        begun = CapturedResult(lambda: self._begin(trainer))
        # A Trainer may run alone while a process group exists.
        began = [begun.fault is None] if trainer.world_size == 1 else gather(begun.fault is None)
        if not all(began):
            self._give_up(trainer)
            begun.reraise()
            return
        # In each step, Lightning broadcasts from rank 0 whether it got SIGTERM. For that, the GPU must finish its work.
        # The ranks agree on a stop through the store.
        replace_sigterm_broadcast(trainer, _skip_broadcast)

    def on_step_boundary(self, trainer: Trainer) -> None:
        """Stop after this step if the ranks have agreed on it."""
        if self._agreement is None:
            return
        self._listen()
        if self._agreement.step_done():
            self._save_and_stop(trainer)
        elif self._agreement.error is not None:
            log.warning("The ranks cannot agree on a step to stop at: %s. Training goes on.", self._agreement.error)
            self._agreement = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close(trainer)  # Lightning calls no `teardown` after an exception

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close(trainer)
        if self._requested is None or stage != "fit":
            return
        requested, self._requested = self._requested, None
        # The signal came too late for the ranks to agree on a step.
        if requested == signal.SIGINT:
            raise SIGTERMException(_exit_code(trainer, requested))
        signal_connector_of(trainer).received_sigterm = True
        # Lightning has restored the original handler, which ends the process.
        run_user_code(lambda: signal.raise_signal(signal.SIGTERM))

    @override
    def _give_up(self, trainer: Trainer | None) -> None:
        """End the threads, and restore the SIGTERM handler from before the `fit`.

        Lightning's broadcast in each step is not restored, because the other ranks would not take part in it.
        """
        self._end_threads()
        if trainer is None or signal.getsignal(signal.SIGTERM) != self._note:
            return
        original = original_handler(trainer, signal.SIGTERM)
        signal.signal(signal.SIGTERM, original or signal.SIG_DFL)
        requested, self._requested = self._requested, None
        if self._ctrl_c:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if requested is not None:
            run_user_code(lambda: signal.raise_signal(requested))

    def _prepare(self, trainer: Trainer) -> None:
        self._close(trainer)  # clean up after a previous run that failed
        FitLoopState.of(trainer)  # calls `on_step_boundary`

    def _begin(self, trainer: Trainer) -> None:
        assert self._store is not None
        self._events = self._poller() if trainer.local_rank == 0 else None
        self._start_agreement(self._store)
        self._listen()

    def _save_and_stop(self, trainer: Trainer) -> None:
        """Save, then wait at the stop barrier, and end or go on with all ranks together."""
        agreement, store = self._agreement, self._store
        assert agreement is not None
        assert store is not None
        interrupted = agreement.reason.startswith(_NAMES[signal.SIGINT])
        signal_connector_of(trainer).received_sigterm = agreement.reason.startswith(_NAMES[signal.SIGTERM])
        # All ranks have agreed to stop here, so this one must come to the stop barrier even if it cannot save.
        saved = CapturedResult(lambda: save_and_record(trainer, agreement.reason))
        if saved.fault is not None:
            self._report("save_and_record", saved.fault)
        with paused(trainer):
            goes_on = StopBarrier(store.part(f"stop_barrier/{self._stops}"), self._state).goes_on()
        if not goes_on:
            signal_connector_of(trainer).received_sigterm = not interrupted
            self._call_replaced_handlers()
            raise SIGTERMException(_exit_code(trainer, signal.SIGINT if interrupted else signal.SIGTERM))
        step = trainer.global_step
        _record(trainer, f"{agreement.reason}, after step {step}; it did not come, and training went on")
        self._start_agreement(store)

    def _start_agreement(self, store: ControlStore) -> None:
        """Start a new agreement, under keys that no previous stop has used."""
        self._stops += 1
        self._agreement = StopAgreement(store.part(f"agreement/{self._stops}"), self._reason, self._agree_s)

    def _poller(self) -> EventPoller | None:
        url = events_url(self._events_url, os.environ)
        return EventPoller(url, *self._times) if url is not None else None

    def _reason(self) -> str | None:
        if self._requested is not None:
            return f"{_NAMES[self._requested]} on rank {self._rank}"
        event = self._events.imminent if self._events is not None else None
        return f"{event.kind} of the node of rank {self._rank}" if event is not None else None

    def _state(self) -> State:
        if self._requested is not None:
            return "leaving"
        return "free" if self._reason() is None else "waiting"

    def _close(self, trainer: Trainer) -> None:
        restore_sigterm(trainer)
        signal_connector_of(trainer).__dict__.pop("register_signal_handlers", None)
        self._replaced = []
        self._end_threads()

    def _end_threads(self) -> None:
        for each in (self._agreement, self._events, self._store):
            if each is not None:
                each.close()
        self._agreement = self._events = self._store = None

    def _listen_with_lightning(self, trainer: Trainer) -> None:
        """Install our handler as soon as Lightning installs its own, which is some time before training starts."""
        connector = signal_connector_of(trainer)
        register = connector.register_signal_handlers

        def register_and_listen() -> None:
            register()
            self._listen()
            if self._ctrl_c and _on_main_thread():
                self._listen_to_ctrl_c(trainer)
            if self._rank == 0 and not _on_main_thread():
                log.info("This fit is off the main thread, where no signal is caught: only Scheduled Events stop it.")

        # Lightning's handler calls this notifier and the script's handler. Its own notifier would broadcast.
        replace_sigterm_notifier(trainer, self._note)
        connector.register_signal_handlers = register_and_listen  # type: ignore[method-assign]

    def _listen(self) -> None:
        """Replace the current handler, which is Lightning's or was set during the fit."""
        if not _on_main_thread():
            return
        there = signal.getsignal(signal.SIGTERM)
        if there != self._note:
            self._replaced.append(there)
            signal.signal(signal.SIGTERM, self._note)

    def _listen_to_ctrl_c(self, trainer: Trainer) -> None:
        """Install the Ctrl-C handler. Lightning restores the previous one after the fit, as for all signals."""
        own_process = os.getpid()

        def end(signum: int, frame: FrameType | None) -> None:
            launcher = trainer.strategy.launcher
            if isinstance(launcher, SubprocessScriptLauncher):
                launcher.kill(signal.SIGKILL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)

        def note(signum: int, frame: FrameType | None) -> None:
            if os.getpid() != own_process:
                return  # this process is a data loader's worker, which the rank still needs
            self._requested = self._requested or signal.SIGINT
            signal.signal(signal.SIGINT, end)
            if self._rank == 0:
                os.write(2, _ON_CTRL_C)  # this handler may have interrupted a write to a buffered stream

        signal.signal(signal.SIGINT, note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        """Only note the signal. Nothing else is safe in a signal handler."""
        self._requested = signal.SIGTERM
        if self._calling:  # a replaced handler has called its predecessor, which is this method
            self._call_next(frame)

    def _call_replaced_handlers(self) -> None:
        """Call the newest of the replaced handlers, on the rank that got the signal. It may call its predecessors."""
        requested, self._requested = self._requested, None
        if requested != signal.SIGTERM:
            return
        self._calling = list(self._replaced)
        try:
            run_user_code(lambda: self._call_next(inspect.currentframe()))
        finally:
            self._calling = []
            self._requested = None

    def _call_next(self, frame: FrameType | None) -> None:
        handler = self._calling.pop() if self._calling else None
        if callable(handler):
            handler(signal.SIGTERM, frame)


def _on_main_thread() -> bool:
    """Python sets and runs signal handlers on the main thread only."""
    return threading.current_thread() is threading.main_thread()


def _skip_broadcast() -> None:
    """Replaces Lightning's broadcast. It is no lambda, so that a Trainer can be pickled during the training."""


def _exit_code(trainer: Trainer, ended_by: signal.Signals) -> int:
    """0 in processes that a strategy started, because for any other code Lightning kills their parent at once."""
    started = trainer.local_rank > 0 and (local.MARKER in os.environ or detect_ranks() is None)
    return 0 if started else _OF_SIGNAL + ended_by
