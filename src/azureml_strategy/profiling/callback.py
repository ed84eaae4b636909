"""`ProfileSteps`, the callback that profiles some steps of some ranks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from azureml_strategy.cluster.isolation import CapturedResult
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.control.gather import open_shared_store
from azureml_strategy.control.store import ControlStore
from azureml_strategy.hang_detection.alarm import run_folder
from azureml_strategy.lightning_internals import accumulates, logged_step
from azureml_strategy.profiling.listener import ProfileListener, SignalListener, check_signal
from azureml_strategy.profiling.request import (
    Details,
    Profile,
    ProfileRequest,
    ProfileRequestError,
    check_ranks,
    parse_ranks,
    parse_steps,
)
from azureml_strategy.profiling.session import LOST, Session, why_busy
from azureml_strategy.profiling.writer import ProfileWriter, Uploader
from azureml_strategy.tracking.events import record_event

log = logging.getLogger(__name__)

# Steps of a request that does not say how many.
_REQUESTED_STEPS = 5
# How long the end of the training waits for traces to be written. After an exception or SIGTERM it waits less, since
# Azure gives a node 30 seconds in all.
_END_SECONDS, _EXCEPTION_SECONDS = 120.0, 10.0
# Attributes that have a value only during a training.
_PER_TRAINING = ("_session", "_store", "_writer", "_listener", "_signals")


class ProfileSteps(Callback):
    """Profiles some steps of some ranks by torch.profiler, and any others on request while the training runs.

    A trace begins with the first step's batch and ends with the last step. Steps are optimizer steps, numbered as
    metrics are logged. Ranks that are not chosen record nothing, and outside of the steps nothing is recorded or
    imported. The step before the first one warms the profiler up.

    Each chosen rank writes `profile/trace_rank_R_steps_A-B.json.gz`, for https://ui.perfetto.dev or chrome://tracing,
    and `profile/summary_rank_R.json`: top operators, exposed communication by collective, idle time, see
    `trace_summary`. They become artifacts of the MLflow run where there is a `JobMLFlowLogger`. Rank 0 prints its
    summary.

    A request needs no restart: write `steps=5 ranks=0,3 shapes=true` into `profile.request` in the run's folder, where
    rank 0 looks every second; or send the signal to any rank, to profile that rank. All ranks begin after the same
    step. The file becomes `profile.taken`, and `profile.answer` says what came of it.

    torch has one profiler at a time. Where another one records, such as Trainer(profiler="pytorch"), this one does not.

    Args:
        steps: the first and the last step, such as `20-25`; None for requests alone.
        ranks: global ranks: a number, a list, or text such as `0,8` or `0-3`.
        shapes: record the shapes of the operators' inputs.
        stacks: record Python's stack of each operator, which is slow.
        memory: record what is allocated and freed.
        folder: where the folder `profile` and the request lie; by default the Trainer's `default_root_dir`, or `logs`
            in an Azure ML job whose Trainer has none.
        on_request: whether to take requests. All ranks must have this callback.
        signal: name of the signal that asks for five steps; None for none. It is left alone where anything else uses
            it.

    Raises:
        ProfileRequestError: steps or ranks cannot be read, or there is no such signal.
    """

    def __init__(
        self,
        steps: str | int | None = None,
        ranks: str | int | Iterable[int] = 0,
        shapes: bool = False,
        stacks: bool = False,
        memory: bool = False,
        folder: str | os.PathLike[str] | None = None,
        on_request: bool = True,
        signal: str | None = "SIGUSR2",
    ) -> None:
        super().__init__()
        details = Details(shapes, stacks, memory)
        self._default = ProfileRequest(_REQUESTED_STEPS, parse_ranks(ranks), details)
        self._configured = None if steps is None else Profile(*parse_steps(steps), self._default.ranks, details)
        self._folder = folder
        self._on_request = on_request
        self._signal = signal if signal is None else check_signal(signal)
        # In order, and the same on all ranks, except that a rank which refuses a plan leaves itself out of it.
        self._plans: list[Profile] = []
        self._session: Session | None = None
        self._store: ControlStore | None = None
        self._writer: ProfileWriter | None = None
        self._listener: ProfileListener | None = None
        self._signals: SignalListener | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        try:
            check_ranks(self._default.ranks, trainer.world_size)
        except ProfileRequestError as error:
            raise MisconfigurationException(f"profile: {error}") from error

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._plans = [] if self._configured is None else [self._configured]
        if not self._plans and not self._on_request:
            return
        self._drop_missed(trainer, logged_step(trainer))
        self._store = open_shared_store("ProfileSteps", trainer.global_rank, trainer.world_size, True).store
        folder = run_folder(trainer) if self._folder is None else Path(self._folder)
        self._writer = ProfileWriter(folder, trainer.global_rank, Uploader(trainer, self._store))
        if self._store is None:
            log.info("No connection to the rendezvous store: this training takes no requests for profiles.")
        elif self._on_request:
            self._listener = ProfileListener(self._store.part("requests"), folder, self._default)
            if self._signal is not None:
                self._signals = SignalListener(self._signal, self._listener.note_signal)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._plans or trainer.global_rank not in self._plans[0].ranks:
            return
        plan, step = self._plans[0], logged_step(trainer)
        if self._session is None and step >= plan.first - 1:
            self._begin(trainer, plan, step)
        elif self._session is not None and self._session.is_warming_up and step == plan.first:
            self._attempt(trainer, self._session.step)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (not self._plans and self._listener is None) or accumulates(trainer):
            return
        step = logged_step(trainer)
        if self._plans and step >= self._plans[0].last:
            self._end(trainer, step)
        elif self._session is not None and not self._session.is_warming_up:
            self._attempt(trainer, self._session.step)
        agreed = self._listener.step_done() if self._listener is not None else None
        if agreed is not None:
            self._plan(step, *agreed)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step = logged_step(trainer)
        if self._plans and self._plans[0].first < step:
            self._end(trainer, step - 1)
        self._drop_missed(trainer, None)
        self._close(_END_SECONDS)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # To end the recording, the profiler waits for the GPU. That may wait for ever for a rank that is gone.
        on_cpu = trainer.strategy.root_device.type == "cpu"
        if self._session is not None and not on_cpu and not isinstance(exception, SIGTERMException):
            self._session.abandon()
            self._session = None
        if self._session is not None and not self._session.is_warming_up:
            self._end(trainer, logged_step(trainer))
        self._close(_EXCEPTION_SECONDS)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close(_EXCEPTION_SECONDS)

    def __getstate__(self) -> dict[str, Any]:
        # A script may copy its Trainer in a hook. Threads, connections and the recording cannot be copied.
        return {**vars(self), "_plans": [], **dict.fromkeys(_PER_TRAINING)}

    def _drop_missed(self, trainer: Trainer, step: int | None) -> None:
        """Drop the plans that end before the next step, with a warning; all plans if `step` is None."""
        missed = [plan for plan in self._plans if step is None or plan.last < step]
        self._plans = [plan for plan in self._plans if plan not in missed]
        for plan in missed:
            ended = f"the training has ended before step {plan.first}"
            why = ended if step is None else f"this training begins at step {step}"
            self._record_outcome(plan, f"refused: {plan.steps} were never reached, {why}.")
            if trainer.is_global_zero:
                log.warning("Nothing is profiled: %s were never reached, %s.", plan.steps, why)

    def _begin(self, trainer: Trainer, plan: Profile, step: int) -> None:
        why = why_busy(trainer)
        if why is not None:
            self._refuse(trainer, why)
            return
        first = max(plan.first, step)  # a training may resume within the range
        self._plans[0] = replace(plan, first=first)
        device = trainer.strategy.root_device
        self._session = self._attempt(trainer, lambda: Session(first, plan.last, first > step, plan.details, device))

    def _end(self, trainer: Trainer, step: int) -> None:
        """End the first plan on all ranks, after its last step or earlier."""
        assert self._writer is not None
        plan, session = replace(self._plans[0], last=min(step, self._plans[0].last)), self._session
        self._writer.uploader.share_run()
        record_event(trainer, "profile", f"{plan.steps} profiled on rank(s) {', '.join(map(str, plan.ranks))}")
        if session is not None:
            stopped = CapturedResult(session.stop)
            if stopped.value:
                self._writer.write(session, plan, lambda text: self._record_outcome(plan, text))
            else:
                self._refuse(trainer, LOST if stopped.fault is None else _text(stopped.fault))
        self._session = None
        del self._plans[0]

    def _plan(self, step: int, request: ProfileRequest, key: str) -> None:
        """Plan the profile of a request, or refuse it; all ranks do the same."""
        assert self._listener is not None
        profile = request.after(step, key)
        too_near = [plan for plan in self._plans if plan.first <= profile.last + 1 and profile.first <= plan.last + 1]
        if too_near:
            self._listener.refuse(key, f"{too_near[0].steps} are to be profiled, too near to {profile.steps}.")
        else:
            self._plans = sorted([*self._plans, profile], key=lambda plan: plan.first)

    def _refuse(self, trainer: Trainer, why: str) -> None:
        """Leave this rank out of the first plan. The steps stay planned, as on the other ranks."""
        plan, rank = self._plans[0], trainer.global_rank
        log.warning("Rank %d does not profile %s: %s.", rank, plan.steps, why)
        self._record_outcome(plan, f"refused: rank {rank} does not profile {plan.steps}: {why}.")
        self._session = None
        self._plans[0] = replace(plan, ranks=tuple(other for other in plan.ranks if other != rank))

    def _record_outcome(self, plan: Profile, text: str) -> None:
        """Send rank 0 the outcome of a request on this rank."""
        if plan.key and self._listener is not None:
            self._listener.done(plan.key, text)

    def _attempt(self, trainer: Trainer, action: Callable[[], Any]) -> Any:
        """Do something with the profiler. If it fails, this rank refuses the plan, and the training goes on."""
        tried = CapturedResult(action)
        if tried.fault is not None:
            self._refuse(trainer, _text(tried.fault))
        return tried.value

    def _close(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        if self._session is not None:  # the training has ended within the warm-up
            CapturedResult(self._session.stop)
        if self._writer is not None and not self._writer.wait(seconds):
            log.warning("The profile is still being written after %.0f s; the training ends without it.", seconds)
        if self._listener is not None:
            self._listener.close(max(0.0, deadline - time.monotonic()))
        for each in (self._signals, self._store):
            if each is not None:
                each.close()
        self._plans, self._session, self._writer = [], None, None
        self._signals = self._listener = self._store = None


def _text(fault: Exception) -> str:
    return redact_text(f"{type(fault).__name__}: {fault}")
