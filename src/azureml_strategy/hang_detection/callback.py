"""`HangWatch`, the callback that runs the watch in every Trainer of a job."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from azureml_strategy.cluster.environ import HANG_WATCH_SWITCH
from azureml_strategy.cluster.isolation import CapturedResult, IsolatedCallback
from azureml_strategy.cluster.launchers import local
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.control import roll_call
from azureml_strategy.control.gather import Value, gather, open_shared_store
from azureml_strategy.control.process import Member, address_towards, this_process
from azureml_strategy.control.rendezvous import another_connection
from azureml_strategy.control.store import ControlStore
from azureml_strategy.hang_detection.alarm import HangReporter, name_ended_processes, say
from azureml_strategy.hang_detection.main_thread import CHECKPOINT, END, START, STOP_BARRIER, TRAINING, Progress
from azureml_strategy.hang_detection.watch import Failure, Watch
from azureml_strategy.lightning_internals import SubprocessScriptLauncher, collective_timeout

# Values of AZUREML_STRATEGY_HANG_WATCH. With `off`, only a HangWatch of your own runs, and it reports.
_MODES = ("off", "report", "kill")
# EX_TEMPFAIL of sysexits.h. Azure ML takes any code but 0 for a failure, and nothing else uses this one.
EXIT_CODE = 75
# Messages of gloo, NCCL and the store when another rank has ended.
_LOST_CONNECTION = re.compile(
    r"gloo/|nccl|connection (closed|reset|refused)|broken pipe|socket timeout|recvValue", re.I
)
_MOST_TEXT = 500
# Time for child processes to end by themselves.
_CHILDREN_SECONDS = 10.0
# Time to see whether the store of rank 0 answers.
_CONNECT_SECONDS = 10.0
# Lower bounds of the default limits for a training batch and for all else.
_LEAST_TRAINING_SECONDS, _LEAST_SECONDS = 600.0, 1800.0


def _hook(name: str, phase: str, ends_batch: bool = False) -> Callable[..., None]:
    """A hook of Lightning's that notes progress in a phase."""

    def note(self: HangWatch, *_: Any, **__: Any) -> None:
        self._note(phase, ends_batch)

    note.__name__ = name  # the warning of a fault names it
    note.__qualname__ = f"HangWatch.{name}"
    return note


class HangWatch(IsolatedCallback):
    """Reports which rank the others wait for, where and in which collective, and ends the job if that rank is gone.

    Stock Lightning waits for the time-out of the process group, half an hour, and then reports that a collective has
    timed out. Here a thread of each rank sends a heartbeat through the rendezvous store every other second. When a rank
    falls silent, a process is gone, or no rank makes progress for too long, all ranks report where they are, from
    torch's flight recorder and their Python frames. Rank 0, or else the lowest rank that can answer, prints which rank
    holds up the others, with its host and last collective, and keeps the report in `hang.attempt_N`.

    If the hang can never resolve by itself, each process ends with exit code 75: a process is gone, or a node with all
    its processes, or ranks are in different collectives. Any other hang may pass: native code that holds the GIL, a
    debugger, a slow disk. It is reported once, and again only after the ranks have made progress.

    When a rank ends with an exception, the other ranks name that rank and its exception, not just a closed connection.

    Every Trainer of a job has this callback. If a Trainer has several, the first one acts, so your own replaces the
    default. A single process waits for no other rank, so it has no watch.

    Args:
        stall_after_s: seconds after which the run counts as hanging if no rank has started or ended a batch, a
            validation or a checkpoint; 0 for never. This limit applies to training batches. The start, up to the end of
            the first batch, and other phases, such as validations and checkpoints, may take as long as a collective.
            Any pause may last three times as long as the longest one before. The default is a third of the time-out of
            the strategy's process group, but at least 600; for other phases, the time-out, but at least 1800.
        dead_after_s: seconds without a heartbeat after which a rank's machine is asked whether the process lives, if
            the other ranks wait too. A thread cannot send heartbeats while other code holds the GIL.
        beat_s: seconds between two heartbeats.
        folder: where `hang.attempt_N` goes; by default the Trainer's `default_root_dir`, or `logs` in an Azure ML job
            whose Trainer has none.
        kill: whether to end the job also for a hang that may pass. By default AZUREML_STRATEGY_HANG_WATCH decides:
            `kill` or `report`; without it, `report`.
    """

    switch = HANG_WATCH_SWITCH

    def __init__(
        self,
        stall_after_s: float | None = None,
        dead_after_s: float = 120.0,
        beat_s: float = 2.0,
        folder: str | os.PathLike[str] | None = None,
        kill: bool | None = None,
    ) -> None:
        self._stall_after_s = stall_after_s
        self._dead_after_s = dead_after_s
        self._beat_s = beat_s
        self._folder = folder
        self._kill = kill
        self._progress: Progress | None = None
        self._resumes_as = TRAINING
        self._watch: Watch | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not self._acts(trainer):
            return
        if trainer.world_size == 1 or not dist.is_initialized():
            return
        # All ranks must reach the meeting, even if this fails on one of them.
        ready = CapturedResult(lambda: _member(trainer))
        rank, size, timeout_s = trainer.global_rank, trainer.world_size, self._dead_after_s
        shared = _unless_ended(lambda: open_shared_store("HangWatch", rank, size, ready.value, timeout_s))
        ready.reraise()
        if shared is None:
            return
        store, members = shared.store, {each.rank: each for each in shared.values if each is not None}
        if store is None or len(members) < len(shared.values):
            if store is not None:
                store.close()
            elif len(shared.unconnected) < len(shared.values):
                rank_zero_warn(
                    f"Nobody watches for hangs: no connection to the rendezvous store on rank(s) {shared.unconnected}."
                )
            return
        begun = CapturedResult(lambda: self._start(trainer, store, members))
        began = _unless_ended(lambda: gather(begun.fault is None))
        if began is not None and not all(began):  # with None, the watches that run name the rank that has ended
            self._close()
        begun.reraise()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not _is_failure(exception):
            self._close()  # SIGTERM and Ctrl-C reach all ranks
            return
        text = redact_text(f"{type(exception).__name__}: {exception}")
        of_others = isinstance(exception, RuntimeError) and bool(_LOST_CONNECTION.search(text))
        one_line = " ".join(text.split())
        shortened = one_line if len(one_line) <= _MOST_TEXT else f"{one_line[:_MOST_TEXT]}..."
        cause = self._watch.fail(Failure(shortened, of_others)) if self._watch is not None else None
        if cause is None and of_others and (known := roll_call.members()) and self._acts(trainer):
            cause = _without_watch(trainer, known)  # the exception came before the watch began
        if cause is not None and sys.version_info >= (3, 11):
            exception.add_note(cause)
        self._watch = None  # its thread goes on, and a checkpoint that is written on the way out is still noted

    def pause(self) -> None:
        """Suspend the limit while the ranks wait at a stop barrier, or for what rank 0 does for all."""
        if self._progress is not None:
            self._resumes_as = START if self._progress.phase == START else TRAINING
            self._progress.note(STOP_BARRIER)

    def resume(self) -> None:
        """Apply the limit again after a stop barrier. A start that was suspended goes on with its own limit."""
        if self._progress is not None:
            self._progress.note(self._resumes_as)

    on_train_batch_start = _hook("on_train_batch_start", TRAINING)
    on_train_batch_end = _hook("on_train_batch_end", TRAINING, ends_batch=True)
    on_train_epoch_end = _hook("on_train_epoch_end", "end of an epoch")
    on_validation_start = _hook("on_validation_start", "validation")
    on_validation_batch_start = _hook("on_validation_batch_start", "validation")
    on_validation_end = _hook("on_validation_end", "end of a validation")
    on_test_batch_start = _hook("on_test_batch_start", "test")
    on_test_batch_end = _hook("on_test_batch_end", "test", ends_batch=True)
    on_predict_batch_start = _hook("on_predict_batch_start", "prediction")
    on_predict_batch_end = _hook("on_predict_batch_end", "prediction", ends_batch=True)
    on_save_checkpoint = _hook("on_save_checkpoint", CHECKPOINT)
    on_test_end = _hook("on_test_end", END)
    on_predict_end = _hook("on_predict_end", END)
    on_fit_end = _hook("on_fit_end", END)

    @override
    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._note("validation", ends_batch=trainer.state.fn == TrainerFn.VALIDATING)

    def writes_checkpoint(self) -> None:
        """Note that training waits for a checkpoint that a background thread writes."""
        self._note(CHECKPOINT)

    @override
    def _give_up(self, trainer: Trainer | None) -> None:
        self._close()

    def _acts(self, trainer: Trainer) -> bool:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        return next(each for each in callbacks if isinstance(each, HangWatch)) is self

    def _start(self, trainer: Trainer, store: ControlStore, members: Mapping[int, Member]) -> None:
        self._progress = Progress(*self._limits(trainer))
        self._watch = Watch(
            store,
            members,
            self._progress,
            lambda: trainer.global_step,
            threading.get_ident(),
            self._dead_after_s,
            self._beat_s,
            HangReporter(trainer, self._folder),
            lambda idle_s: _end_process(trainer, idle_s),
            _kills() if self._kill is None else self._kill,
        )

    def _note(self, phase: str, ends_batch: bool = False) -> None:
        if self._progress is not None:
            (self._progress.batch_done if ends_batch else self._progress.note)(phase)

    def _limits(self, trainer: Trainer) -> tuple[float, float]:
        timeout = collective_timeout(trainer.strategy) or default_pg_timeout
        collective_s = timeout.total_seconds()
        if self._stall_after_s is None:
            return max(_LEAST_TRAINING_SECONDS, collective_s / 3), max(_LEAST_SECONDS, collective_s)
        if self._stall_after_s == 0:
            return float("inf"), float("inf")
        return self._stall_after_s, max(self._stall_after_s, collective_s)

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = self._progress = None


def _member(trainer: Trainer) -> Member:
    """Return this process, with an address at which other machines can ask its kernel whether it lives."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    own = address_towards(address, int(port)) if address and port.isdigit() else ""
    return this_process(trainer.global_rank, trainer.node_rank, own)


def _kills() -> bool:
    """Whether AZUREML_STRATEGY_HANG_WATCH makes every hang end the job."""
    value = os.environ.get(HANG_WATCH_SWITCH, "").strip().lower()
    if value not in ("", *_MODES):
        modes = ", ".join(_MODES)
        rank_zero_warn(f"{HANG_WATCH_SWITCH}={value!r} is none of {modes}. Hangs are reported, and end nothing.")
    return value == "kill"


def _unless_ended(collective: Callable[[], Value]) -> Value | None:
    """Run a collective; None if a rank has ended, which the run's next collective reports as well."""
    try:
        return collective()
    except RuntimeError as error:
        if not _LOST_CONNECTION.search(str(error)):
            raise
        return None


def _without_watch(trainer: Trainer, known: Mapping[int, Member]) -> str | None:
    def store_answers() -> bool:
        if not dist.is_initialized():
            return True  # unknown, so do not blame rank 0
        return another_connection(trainer.world_size, timedelta(seconds=_CONNECT_SECONDS)) is not None

    return name_ended_processes(trainer.global_rank, known, store_answers)


def _is_failure(exception: BaseException) -> bool:
    """Whether an exception is this rank's own failure, not a signal that reaches all ranks."""
    if isinstance(exception, SystemExit):
        return not isinstance(exception, SIGTERMException) and exception.code not in (0, None)
    return isinstance(exception, Exception)


def _end_process(trainer: Trainer, idle_s: float) -> None:
    """End this process and its child processes while its main thread hangs."""
    # The first process of the node reports the failure for the processes that it started.
    code = 0 if local.MARKER in os.environ and trainer.local_rank > 0 else EXIT_CODE
    launcher = trainer.strategy.launcher
    children = launcher.procs if isinstance(launcher, SubprocessScriptLauncher) else []
    deadline = time.monotonic() + _CHILDREN_SECONDS
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    for child in children:
        child.kill()
    did = f"its main thread has done nothing for {idle_s:.0f} s"
    say(f"Rank {trainer.global_rank}: {did}; the process ends with exit code {code}.")
    sys.stdout.flush()
    os._exit(code)
