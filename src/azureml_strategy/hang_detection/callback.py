"""The watch, as a callback that every Trainer of a job has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from azureml_strategy.cluster.environ import HANG_WATCH_SWITCH
from azureml_strategy.cluster.isolation import Attempt, IsolatedCallback
from azureml_strategy.cluster.launchers import local
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.control import roll_call
from azureml_strategy.control.channel import BoundedStore, another_connection
from azureml_strategy.control.gather import gather
from azureml_strategy.control.process import Member, address_towards, this_process
from azureml_strategy.hang_detection.alarm import Records, name_the_gone, say
from azureml_strategy.hang_detection.main_thread import CHECKPOINT, END, STANDSTILL, TRAINING, Progress
from azureml_strategy.hang_detection.watch import Failure, Watch

# What AZUREML_STRATEGY_HANG_WATCH may be. With `off`, a Trainer has no watch but one of your own, which reports.
_MODES = ("off", "report", "kill")
# EX_TEMPFAIL of sysexits.h: any code but 0 is a failure to Azure ML, and this one is no other's.
EXIT_CODE = 75
# What gloo, NCCL and the store say when it is another rank that has ended.
_OF_OTHERS = re.compile(r"gloo/|nccl|connection (closed|reset|refused)|broken pipe|socket timeout|recvValue", re.I)
_MOST_TEXT = 500
# For the processes that this one has started to end by themselves.
_CHILDREN_SECONDS = 10.0
# To connect once more, where a connection has ended.
_CONNECT_SECONDS = 10.0
# No run counts as hanging sooner, unless it is asked for.
_LEAST_TRAINING_SECONDS, _LEAST_SECONDS = 600.0, 1800.0


@dataclass(frozen=True)
class _Arrival:
    """What a rank tells all others when the watch begins: one that dies right after that is known already.

    Attributes:
        member: its process.
        run: a name that no other run has; rank 0's is taken.
        outside: whether it has no connection to the store.
    """

    member: Member
    run: str
    outside: bool


class HangWatch(IsolatedCallback):
    """Says which rank the others wait for, where and in what, and ends the job if that rank is gone.

    Stock Lightning waits for the time-out of the process group, half an hour, and then says that a collective has
    timed out. Here a thread of each rank gives a sign of life every other second through the rendezvous store. When
    one falls silent, when a process is gone, or when no rank has done anything for too long, all ranks say where they
    are, by torch's flight recorder and by their Python frames. Rank 0 prints which rank holds up the others, with its
    host and its last collective, and keeps all that in `hang.attempt_N`.

    Where that can never resolve by itself each process ends with exit code 75: a process is gone, or a node with all
    of its processes, or ranks stand in different collectives. All else may pass: native code that holds Python's lock,
    a debugger, a slow disk. It is reported once, and again only after the ranks have gone on.

    When a rank ends with an exception, the others name it and its exception instead of a closed connection.

    Every Trainer of a job has one; of several in a Trainer the first acts, so that one of your own replaces it. A
    single process has nobody to wait for, and no watch.

    Args:
        stall_after_s: after how long without the start or end of a batch, a validation or a checkpoint on any rank the
            run counts as hanging, in seconds; 0 for never. It is meant for the batches of a training: the start, up to
            the end of the first batch, and all else, such as validations and checkpoints, may take as long as a
            collective, and each pause three times as long as the longest until then. By default a third of the
            time-out of the strategy's process group, but no less than 600, and 1800 for all else.
        dead_after_s: after how long without a sign of life a rank's machine is asked whether the process lives, if the
            others wait for it as well, in seconds. A thread cannot speak while other code holds Python's lock.
        beat_s: pause between two signs of life, in seconds.
        folder: where `hang.attempt_N` goes; by default the Trainer's `default_root_dir`, or `logs` in an Azure ML job
            whose Trainer has none.
        kill: whether to end the job also where the hang may pass. By default as AZUREML_STRATEGY_HANG_WATCH says:
            `kill`, or `report`, which is its default.
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
        self._watch: Watch | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not self._acts(trainer):
            return
        if trainer.world_size == 1 or not dist.is_initialized():
            return
        # Whatever fails here on one rank, the others must not wait for it.
        ready = Attempt(lambda: self._arrive(trainer))
        arrival, connection = ready.value or (None, None)
        met: list[_Arrival | None] | None = _gathered(arrival)
        ready.settle()
        if met is None:
            return
        present = {each.member.rank: each for each in met if each is not None and not each.outside}
        if connection is None or len(present) < len(met):
            if present:
                outside = [rank for rank in range(len(met)) if rank not in present]
                rank_zero_warn(f"Nobody watches for hangs: no connection to the rendezvous store on rank(s) {outside}.")
            return
        # Names of this run's own: the store may outlive it, as torchrun's does, and hold what a dead attempt has said.
        names = f"azureml_strategy/watch/{present[0].run}"
        members = {rank: each.member for rank, each in present.items()}
        begun = Attempt(lambda: self._start(trainer, PrefixStore(names, connection), names, members))
        began = _gathered(begun.fault is None)
        if began is not None and not all(began):  # where a rank has ended, those that have begun name it
            self._close()
        begun.settle()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not _is_failure(exception):
            self._close()  # SIGTERM and Ctrl-C reach all ranks
            return
        text = redact_text(f"{type(exception).__name__}: {exception}")
        of_others = isinstance(exception, RuntimeError) and bool(_OF_OTHERS.search(text))
        cause = self._watch.fail(Failure(_shortened(text), of_others)) if self._watch is not None else None
        if cause is None and of_others and (known := roll_call.members()) and self._acts(trainer):
            cause = _without_watch(trainer, known)  # it came before the watch
        if cause is not None and sys.version_info >= (3, 11):
            exception.add_note(cause)
        self._watch = None  # which goes on: a checkpoint that is written on the way out is still noted

    def pause(self) -> None:
        """The ranks stand still on purpose."""
        if self._progress is not None:
            self._progress.note(STANDSTILL)

    def resume(self) -> None:
        """They go on."""
        if self._progress is not None:
            self._progress.note(TRAINING)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._note(TRAINING)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch_done(TRAINING)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note("end of an epoch")

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note("validation")

    @override
    def on_validation_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._note("validation")

    @override
    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        (self._batch_done if trainer.state.fn == TrainerFn.VALIDATING else self._note)("validation")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note("end of a validation")

    @override
    def on_test_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._note("test")

    @override
    def on_test_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._batch_done("test")

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note(END)

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note(END)

    @override
    def on_predict_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._note("prediction")

    @override
    def on_predict_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._batch_done("prediction")

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._note(CHECKPOINT)

    def writes_checkpoint(self) -> None:
        """The training waits for a checkpoint that a thread writes."""
        self._note(CHECKPOINT)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note(END)

    @override
    def _give_up(self, trainer: Trainer | None) -> None:
        self._close()

    def _arrive(self, trainer: Trainer) -> tuple[_Arrival, Store | None]:
        connection = another_connection(trainer.world_size, timedelta(seconds=self._dead_after_s))
        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        own = address_towards(address, int(port)) if connection is not None else ""
        member = this_process(trainer.global_rank, trainer.node_rank, own)
        return _Arrival(member, uuid.uuid4().hex, connection is None), connection

    def _acts(self, trainer: Trainer) -> bool:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        return next(each for each in callbacks if isinstance(each, HangWatch)) is self

    def _start(self, trainer: Trainer, store: Store, names: str, members: Mapping[int, Member]) -> None:
        def connect() -> Store | None:
            connection = another_connection(trainer.world_size, timedelta(seconds=_CONNECT_SECONDS))
            return None if connection is None else PrefixStore(names, connection)

        self._progress = Progress(*self._limits(trainer))
        self._watch = Watch(
            BoundedStore(store, self._dead_after_s),
            connect,
            trainer.global_rank,
            members,
            self._progress,
            lambda: trainer.global_step,
            threading.get_ident(),
            self._dead_after_s,
            self._beat_s,
            Records(trainer, self._folder),
            lambda idle_s: _end_process(trainer, idle_s),
            _kills() if self._kill is None else self._kill,
        )

    def _note(self, phase: str) -> None:
        if self._progress is not None:
            self._progress.note(phase)

    def _batch_done(self, phase: str) -> None:
        if self._progress is not None:
            self._progress.batch_done(phase)

    def _limits(self, trainer: Trainer) -> tuple[float, float]:
        timeout = getattr(trainer.strategy, "_timeout", None) or default_pg_timeout
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


def _kills() -> bool:
    """Whether the environment has any hang end the job."""
    value = os.environ.get(HANG_WATCH_SWITCH, "").strip().lower()
    if value not in ("", *_MODES):
        modes = ", ".join(_MODES)
        rank_zero_warn(f"{HANG_WATCH_SWITCH}={value!r} is none of {modes}. Hangs are reported, and end nothing.")
    return value == "kill"


def _gathered(value: Any) -> list[Any] | None:
    """What each rank gave; None where one has ended meanwhile, which the run's next collective says as well."""
    try:
        return gather(value)
    except RuntimeError as error:
        if not _OF_OTHERS.search(str(error)):
            raise
        return None


def _without_watch(trainer: Trainer, known: Mapping[int, Member]) -> str | None:
    def store_answers() -> bool:
        if not dist.is_initialized():
            return True  # who knows
        return another_connection(trainer.world_size, timedelta(seconds=_CONNECT_SECONDS)) is not None

    return name_the_gone(trainer.global_rank, known, store_answers)


def _is_failure(exception: BaseException) -> bool:
    """Whether it is this rank's own, and not a signal that all ranks have."""
    if isinstance(exception, SystemExit):
        return not isinstance(exception, SIGTERMException) and exception.code not in (0, None)
    return isinstance(exception, Exception)


def _shortened(text: str) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= _MOST_TEXT else f"{one_line[:_MOST_TEXT]}..."


def _end_process(trainer: Trainer, idle_s: float) -> None:
    """End this process, and those that it has started, while its main thread hangs."""
    code = 0 if local.MARKER in os.environ and trainer.local_rank > 0 else EXIT_CODE
    launcher = trainer.strategy.launcher
    if isinstance(launcher, _SubprocessScriptLauncher):
        _end_children(launcher.procs)
    did = f"its main thread has done nothing for {idle_s:.0f} s"
    say(f"Rank {trainer.global_rank}: {did}; the process ends with exit code {code}.")
    sys.stdout.flush()
    os._exit(code)


def _end_children(children: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _CHILDREN_SECONDS
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    for child in children:
        child.kill()
