"""Sends the files of a profile to the artifacts of the MLflow run, from any rank."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import Trainer

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.control.channel import StoreLostError
from azureml_strategy.control.store import ControlStore
from azureml_strategy.interfaces import KeepsFiles
from azureml_strategy.tracking.run import is_remote

log = logging.getLogger(__name__)

FOLDER = "profile"
# Sending a larger one would take the network, and the end of the run, for minutes.
MOST_UPLOADED_BYTES = 100_000_000
_KEY = "mlflow_run"
# How long a rank waits for rank 0 to share the run's id, and its pause between two looks.
_PATIENCE_SECONDS, _PAUSE_SECONDS = 20.0, 0.2


class Uploader:
    """Keeps files with the MLflow run: those of rank 0 by its logger, in the background; others send theirs themselves.

    The other ranks do not know the run's id. Rank 0 shares it through the control store. A tracking store that is a
    file can be reached from its own machine only.
    """

    def __init__(self, trainer: Trainer, store: ControlStore | None) -> None:
        self._loggers = [each for each in trainer.loggers if isinstance(each, KeepsFiles)]
        self._rank = trainer.global_rank
        self._store = store

    def share_run(self) -> None:
        """Share the run's id with the other ranks. It may wait for the tracking store."""
        if self._rank > 0 or self._store is None or not self._loggers:
            return
        run_id, address = self._loggers[0].run_and_store()
        if run_id is not None:
            self._store.set(_KEY, json.dumps([run_id, address, socket.gethostname()]))

    def send(self, files: Sequence[Path]) -> str:
        """Send files; return a sentence about those that stay on this machine's disk only, or nothing."""
        small = [each for each in files if each.stat().st_size <= MOST_UPLOADED_BYTES]
        large = [each.name for each in files if each not in small]
        reason = self._try_to_send(small) if self._loggers else "there is no MLflow run"
        if reason:
            return f"It stays there, as {reason}."
        limit = f"{MOST_UPLOADED_BYTES / 1e6:.0f} MB"
        return f"{', '.join(large)} stays there: it has more than {limit}." if large else ""

    def _try_to_send(self, files: Sequence[Path]) -> str | None:
        logger = self._loggers[0]
        if self._rank == 0:
            for each in files:
                logger.log_file(each, FOLDER)
            return None
        try:
            if (message := self._wait_for_rank_0()) is None:
                return "rank 0 has not told this rank the MLflow run"
            run_id, address, host = json.loads(message)
            own = logger.run_and_store()[1]
            if own != address or not (is_remote(address) or host == socket.gethostname()):
                return f"the MLflow store of rank 0 cannot be reached from {socket.gethostname()}"
            for each in files:
                logger.send_file(run_id, each, FOLDER)
        except (RuntimeError, StoreLostError) as error:  # the tracking store, or the rendezvous store
            return f"MLflow does not take it: {redact_text(str(error))}"
        return None

    def _wait_for_rank_0(self) -> str | None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._store is not None and time.monotonic() < deadline:
            if (message := self._store.get(_KEY)) is not None or self._store.pause(_PAUSE_SECONDS):
                return message
        return None
