"""Takes requests for profiles while a job runs, and has all ranks begin after the same step."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.control.agreement import StopAgreement
from azureml_strategy.control.channel import StoreLostError
from azureml_strategy.control.store import ControlStore
from azureml_strategy.files import write_atomically
from azureml_strategy.profiling.request import (
    ANSWER,
    REQUEST,
    TAKEN,
    ProfileRequest,
    ProfileRequestError,
    check_ranks,
    parse_request,
)

log = logging.getLogger(__name__)

# How often rank 0 looks into its folder, and each rank into the control store.
_LOOK_SECONDS = 1.0
# How often rank 0 looks at the end of a training, while it waits for the other ranks' traces.
_PAUSE_SECONDS = 0.05


class ProfileListener:
    """Waits for requests on all ranks: for a file in the folder of rank 0, and for a signal to any rank.

    A thread of rank 0 looks for the file, because a disk may hang. The control channel's threads find a step after
    which all ranks begin, as for a stop. The training's threads only count steps. An empty request means `default`. A
    signal asks for the same profile, but of the rank that got the signal.
    """

    def __init__(self, store: ControlStore, folder: Path, default: ProfileRequest) -> None:
        self._store = store
        self._folder = folder
        self._default = default
        self._pending_request: str | None = None  # made on this rank, until all ranks have agreed on a step for it
        self._by_file = False
        self._signals = 0
        self._unanswered: dict[str, tuple[int, ...]] = {}  # ranks whose outcomes an answer to a request file waits for
        self._rounds = 0
        self._over = threading.Event()
        self._agreement = self._next_agreement()
        self._thread = threading.Thread(target=self._watch, name="profile-requests", daemon=True)
        if store.rank == 0:
            self._thread.start()

    def step_done(self) -> tuple[ProfileRequest, str] | None:
        """Count a step of this rank. Return the request that all ranks begin now, if any, and its outcomes' key."""
        if not self._agreement.step_done():
            return None
        key, _, text = self._agreement.reason.partition(" ")
        request = parse_request(text, self._default)
        if self._pending_request == self._agreement.reason:
            if self._by_file:
                self._unanswered[key] = request.ranks
            self._pending_request, self._by_file = None, False
        self._agreement = self._next_agreement()
        return request, key

    def refuse(self, key: str, why: str) -> None:
        """Refuse a request, as all other ranks do."""
        if self._unanswered.pop(key, None) is not None:
            self._answer(f"refused: {why}")
        elif self._store.rank == 0:
            log.warning("The profile that was asked for is refused: %s", why)

    def done(self, key: str, text: str) -> None:
        """Send rank 0 the outcome of a request on this rank."""
        with suppress(StoreLostError):
            self._store.set(f"outcome/{key}/{self._store.rank}", text)

    def note_signal(self, signum: int, frame: FrameType | None) -> None:
        """Ask for a profile of this rank. This is a handler of signals."""
        self._signals += 1

    def close(self, seconds: float) -> None:
        """Take no further requests, refuse the one that waits, and wait at most so long for the other ranks' traces."""
        deadline = time.monotonic() + seconds
        self._over.set()
        self._agreement.close()
        if self._thread.is_alive():
            self._thread.join(2 * _LOOK_SECONDS)
        if self._pending_request is not None and self._by_file:
            self._answer("refused: the training has ended.")
        with suppress(StoreLostError):
            while self._unanswered and time.monotonic() < deadline:
                self._answer_done()
                time.sleep(_PAUSE_SECONDS)
        for key in list(self._unanswered):
            del self._unanswered[key]
            self._answer("refused: the training has ended before all ranks were done.")

    def _next_agreement(self) -> StopAgreement:
        """Begin to wait for the next request, under keys of its own."""
        self._rounds += 1
        return StopAgreement(self._store.part(f"agreement/{self._rounds}"), self._reason, _LOOK_SECONDS)

    def _reason(self) -> str | None:
        if self._pending_request is None and self._signals:
            self._signals = 0
            rank = self._store.rank
            request = ProfileRequest(self._default.count, (rank,), self._default.details)
            self._pending_request = f"{rank}.{time.time_ns()} {request.to_text()}"
        return self._pending_request

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            with suppress(OSError, StoreLostError):  # the next look tries again
                self._answer_done()
                if self._pending_request is None:
                    self._take_file()
            if self._pending_request is not None and self._by_file and self._agreement.error is not None:
                self._answer(f"refused: the ranks cannot agree on a step ({self._agreement.error}).")
                self._pending_request = None

    def _take_file(self) -> None:
        """Take the request file, if there is one."""
        path = self._folder / REQUEST
        if not path.exists():
            return
        taken = self._folder / TAKEN
        path.replace(taken)
        try:
            request = parse_request(taken.read_text(encoding="utf-8", errors="replace"), self._default)
            check_ranks(request.ranks, self._store.world_size)
        except ProfileRequestError as error:
            self._answer(f"refused: {error}")
            return
        self._by_file = True
        self._pending_request = f"0.{time.time_ns()} {request.to_text()}"

    def _answer_done(self) -> None:
        """Answer the requests whose ranks are all done."""
        for key, ranks in list(self._unanswered.items()):
            texts = self._store.get_if_all([f"outcome/{key}/{rank}" for rank in ranks])
            if texts is not None and self._unanswered.pop(key, ()):
                self._answer("\n".join(texts))

    def _answer(self, text: str) -> None:
        path = self._folder / ANSWER
        try:
            write_atomically(path, redact_text(text.rstrip() + "\n").encode())
        except OSError as error:
            log.warning("%s cannot be written: %s", path, error)


class SignalListener:
    """Calls a handler on a signal, such as SIGUSR2, if nothing else in this process uses that signal."""

    def __init__(self, name: str, handler: Any) -> None:
        self._number = signal.Signals[name]
        self._handler = handler
        self.taken = threading.current_thread() is threading.main_thread() and not _is_used(self._number)
        if self.taken:
            signal.signal(self._number, handler)

    def close(self) -> None:
        """Give the signal back, unless another handler has taken it since."""
        if self.taken and signal.getsignal(self._number) == self._handler:
            signal.signal(self._number, signal.SIG_DFL)


def check_signal(name: str) -> str:
    """Return the name of a signal that a process can catch.

    Raises:
        ProfileRequestError: it is none.
    """
    if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
        raise ProfileRequestError(
            f"signal={name} is no signal that a process can catch: write signal=SIGUSR1, or null."
        )
    return name


def _is_used(number: signal.Signals) -> bool:
    """Whether this process catches or ignores a signal."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return True
    # Python does not know of handlers that C code has set, such as faulthandler's.
    with suppress(OSError), Path(f"/proc/{os.getpid()}/status").open(encoding="utf-8") as file:
        masks = [int(line.split()[1], 16) for line in file if line.startswith(("SigCgt:", "SigIgn:"))]
        return any(mask >> (number - 1) & 1 for mask in masks)
    return False
