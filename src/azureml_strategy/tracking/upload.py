"""Sends the files of records that a store has not taken, at the next start or by hand."""

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

# How often to send a refused item again while it is unclear whether the fault lies with the item.
_LOOKS = 3


def command(folder: Path) -> str:
    """The shell command that sends the files of a folder."""
    return f"azureml-strategy jobs upload-metrics {shlex.quote(str(folder.absolute()))}"


def upload(spool: Spool, tracking_uri: str) -> str:
    """Send what the store does not have of a file, and delete the file once the store has all of it.

    Args:
        spool: the file, held.
        tracking_uri: the store.

    Returns:
        The id of the run.

    Raises:
        ValueError: the file is not one of ours.
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
    """Files that earlier starts left in a run's folder for the same store.

    Args:
        folder: the folder of the run.
        request: the run.
    """

    def __init__(self, folder: Path, request: RunRequest) -> None:
        self._uri = request.tracking_uri
        self._spools: list[Spool] = []
        with suppress(OSError):  # an unreadable folder must not stop training
            store = describe_store(self._uri)
            self._spools = [each for each in find_spools(folder, deep=False) if each.store == store]

    def __bool__(self) -> bool:
        return bool(self._spools)

    def send(self) -> None:
        """Send all files. A file that cannot be sent stays, with a warning.

        Raises:
            StoreAwayError: the store does not answer. Another call sends the rest.
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
    """Send every such file in a folder and its subfolders.

    Args:
        folder: the folder, or one such file.
        address: maps the store's address in a file to the address to use.
        tell: prints a line.

    Returns:
        Whether all files were sent.
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
