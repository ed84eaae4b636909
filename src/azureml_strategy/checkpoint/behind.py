"""One thing at a time done behind the training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from azureml_strategy.cluster.redaction import redact_text

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class Behind(Generic[Result]):
    """A thread that does one thing, and after that the next.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._result: Result | None = None

    @property
    def busy(self) -> bool:
        """Whether something was begun that `finish` has not been called for."""
        return self._thread is not None

    def begin(self, work: Callable[[], Result | None]) -> None:
        """Do something on the thread; what was begun before must be finished.

        Args:
            work: what raises there is logged, and gives None.
        """
        assert self._thread is None, "one at a time"

        def run() -> None:
            try:
                self._result = work()
            except Exception as error:  # nobody else would see it
                log.warning("%s: %s: %s", self._name, type(error).__name__, redact_text(str(error)))

        # A daemon: where other ranks are gone, an interpreter that waits for it would not end.
        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float | None = None) -> Result | None:
        """Wait for what was begun, and forget it.

        Args:
            timeout_s: how long at most, in seconds; None without end.

        Returns:
            Its result; None where it failed, or is not done in time.
        """
        thread = self._thread
        if thread is None:
            return None
        thread.join(timeout_s)  # may be interrupted: then it is still under way
        self._thread = None
        result, self._result = (None, None) if thread.is_alive() else (self._result, None)
        return result
