"""Sends the files of what a store has not taken, by the next start or by hand."""

from __future__ import annotations

import shlex
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from azureml_strategy.tracking.run import RunRequest, describe_store
from azureml_strategy.tracking.sender import SECOND_LOOK_S, Sender
from azureml_strategy.tracking.spool import Spool, find_spools
from azureml_strategy.tracking.store import StoreAwayError, StoreRefusedError, TrackingError, store_errors

# How often an item is looked at again that the store refuses, while nothing shows whether it is right to.
_LOOKS = 3


def command(folder: Path) -> str:
    """What a person types to send the files of a folder."""
    return f"azureml-strategy jobs upload-metrics {shlex.quote(str(folder.absolute()))}"


def upload(spool: Spool, tracking_uri: str) -> str:
    """Send what a file holds and delete it once all of it stands; what stands already is not written again.

    Args:
        spool: the file, held.
        tracking_uri: the store.

    Returns:
        The id of the run.

    Raises:
        ValueError: the file is none of ours.
        TrackingError: the store does not have the run, or refuses an item; the file stays.
        StoreAwayError: the store does not answer; the file stays.
    """
    request = spool.request(tracking_uri)
    with store_errors():
        run = request.open(again=True)
    if request.run_id is None:
        spool.opened(run.run_id)
    sender = Sender(run)
    for batch, _ in spool.batches():
        sender.send(batch)
    for _ in range(_LOOKS if sender.suspects else 0):
        time.sleep(SECOND_LOOK_S)
        sender.look_again()
    refused = sender.left_out + len(sender.suspects)
    if refused:
        raise TrackingError(
            f"{refused} item(s) in {spool.path} are refused by {describe_store(tracking_uri)}; all others stand in run "
            f"{run.run_id}. The file stays: delete it if they do not matter."
        )
    spool.remove()
    return run.run_id


class Leftovers:
    """Files in a run's folder that earlier starts left for the same store.

    Args:
        folder: the run's.
        request: the run.
    """

    def __init__(self, folder: Path, request: RunRequest) -> None:
        self._uri = request.tracking_uri
        self._spools: list[Spool] = []
        with suppress(OSError):  # a folder that cannot be read is no reason not to train
            store = describe_store(self._uri)
            self._spools = [each for each in find_spools(folder, deep=False) if each.store == store]

    def __bool__(self) -> bool:
        return bool(self._spools)

    def send(self) -> None:
        """Send them all; one that cannot be sent stays, and costs a warning.

        Raises:
            StoreAwayError: the store does not answer; the rest is sent by another call.
        """
        while self._spools:
            spool = self._spools[0]
            try:
                self._send(spool)
            except (ValueError, TrackingError, StoreRefusedError, OSError) as error:
                warnings.warn(f"{error} Send it by hand: {command(spool.path)}", stacklevel=2)
            del self._spools[0]

    def _send(self, spool: Spool) -> None:
        if not spool.path.exists() or not spool.hold():
            return
        try:
            upload(spool, self._uri)
        finally:
            spool.close()


def upload_all(folder: Path, address: Callable[[str], str], tell: Callable[[str], None]) -> bool:
    """Send every such file in a folder and below.

    Args:
        folder: or one such file.
        address: the store's address to use for the one that a file names.
        tell: prints a line.

    Returns:
        Whether nothing is left.
    """
    spools = find_spools(folder)
    if not spools:
        tell(f"There are no unsent metrics in {folder.absolute()}.")
    sent = [_upload_and_tell(spool, address, tell) for spool in spools]
    return all(sent)


def _upload_and_tell(spool: Spool, address: Callable[[str], str], tell: Callable[[str], None]) -> bool:
    try:
        if not spool.hold():
            tell(f"{spool.path}: another process writes or sends it just now.")
            return False
        run_id = upload(spool, address(spool.store))
    except (OSError, ValueError, TrackingError, StoreAwayError, StoreRefusedError) as error:
        tell(f"{spool.path}: {error}")
        return False
    finally:
        spool.close()
    tell(f"{spool.path}: all of it stands in run {run_id}; the file is removed.")
    return True
