"""A file of records that the store has not taken. It outlives the process, and the next start or a command sends it.

Each line is a JSON object, and lines are only appended. The first line identifies the run. Each other line holds one
metric, parameter, tag, text file, path of a file on disk, or the end of the run:

    {"run": {"run_id": null, "experiment_name": "...", ...}, "store": "http://host:5000"}
    {"run_id": "..."}                                           once the run is opened
    {"metrics": "loss", "value": 0.5, "step": 3, "timestamp_ms": 1763800000000}
    {"params": "lr", "value": "0.1"}        {"tags": ...}        {"files": "network.json", "value": "..."}
    {"artifacts": "profile/trace.json.gz", "value": "/path/of/the/file"}
    {"end": "status", "value": "FINISHED", "timestamp_ms": 1763800000000}
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.tracking.batch import LIMITS, Batch, DiskFile, End, TextFile, param, tag
from azureml_strategy.tracking.run import RunRequest, describe_store
from azureml_strategy.tracking.sender import SECOND_LOOK_S, Sender
from azureml_strategy.tracking.store import StoreAwayError, StoreRefusedError, TrackingError, store_errors

_SUFFIX = ".unsent.jsonl"


class OfflineQueue:
    """One such file, which may not exist. While an object holds it, no other process writes or sends it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    @classmethod
    def create(cls, folder: Path, request: RunRequest) -> OfflineQueue:
        """Create the file of a run, and hold it.

        Raises:
            OSError: it cannot be written.
        """
        queue = cls(folder / f"mlflow-{request.start_id}{_SUFFIX}")
        folder.mkdir(parents=True, exist_ok=True)
        queue.path.touch()
        queue.hold()
        run = {name: value for name, value in asdict(request).items() if name != "tracking_uri"}
        run["tags"] = {name: redact_text(value) for name, value in run["tags"].items()}
        queue._append([{"run": run, "store": describe_store(request.tracking_uri)}])
        return queue

    def hold(self) -> bool:
        """Lock the file for this process; return False if it is gone, or if another process writes or sends it now."""
        try:  # without O_CREAT, which would create a file anew that another process has sent and removed
            file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_APPEND), "ab+")
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        except OSError:  # a file system without locks: of two processes, the second finds all of it in the store
            pass
        if not os.fstat(file.fileno()).st_nlink:  # another process has sent and removed it meanwhile
            file.close()
            return False
        self._file = file
        return True

    def append(self, batches: Iterable[Batch]) -> None:
        """Add a line for each item.

        Raises:
            OSError: the file cannot be written.
        """
        self._append([_as_line(batch.kind, item) for batch in batches for item in batch.items])

    def opened(self, run_id: str) -> None:
        """Record the id of the run once it is opened."""
        self._append([{"run_id": run_id}])

    def request(self, tracking_uri: str) -> RunRequest:
        """The request for the run that the lines belong to.

        Raises:
            ValueError: the first line names no run.
        """
        try:
            lines = [line for line, _ in self._lines(0) if "run" in line or "run_id" in line]
            request = RunRequest(tracking_uri, **lines[0]["run"])
            request = replace(request, run_id=lines[-1].get("run_id", request.run_id))
            values = {**asdict(request), **request.tags}
            del values["tags"], values["started_ms"]
            not_texts = [name for name, value in values.items() if not isinstance(value, str | None)]
            if not_texts or type(request.started_ms) is not int or not request.start_id.isalnum():
                raise TypeError(f"{', '.join(not_texts) or 'its start'} is no text")
        except (IndexError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path} is no file of unsent metrics: its first line names no run ({error})."
            ) from None
        return request

    @property
    def store(self) -> str:
        """The store that the lines are for, without secrets; see `run.describe_store`."""
        return next((str(line["store"]) for line, _ in self._lines(0) if "store" in line), "")

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self.path.stat().st_size

    def batches(self, start: int = 0) -> Iterator[tuple[Batch, int]]:
        """Yield the content in batches that a store accepts, each with the offset in bytes where the next one begins.

        `start` is 0 or such an offset. Each batch may have been sent already.
        """
        batch, end = Batch("", []), start
        for line, after in self._lines(start):
            kind = next(iter(line))
            if kind in LIMITS:
                if batch.items and (kind != batch.kind or len(batch.items) == LIMITS[kind]):
                    yield batch, end
                    batch = Batch("", [])
                batch = Batch(kind, [*batch.items, self._parse_item(kind, line)], doubtful=True)
            end = after
        if batch.items or end > start:
            yield batch, end

    def _parse_item(self, kind: str, line: dict[str, Any]) -> Any:
        from mlflow.entities import Metric

        try:
            key, value = line[kind], line["value"]
            if kind == "metrics":
                return Metric(key, float(value), line["timestamp_ms"], line["step"])
            if kind == "end":
                return End(value, line["timestamp_ms"])
            return {"params": param, "tags": tag, "files": TextFile, "artifacts": DiskFile}[kind](key, value)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"{self.path} has a damaged line of {kind} ({error!r:.100}): {json.dumps(line)[:100]}. Remove the "
                "line, and send the rest."
            ) from error

    def remove(self) -> None:
        """Delete the file, after the store has taken all of it."""
        self.path.unlink()
        self.close()

    def close(self) -> None:
        """Release the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, lines: list[dict[str, Any]]) -> None:
        assert self._file is not None, "held"
        self._file.seek(0, os.SEEK_END)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # the previous process was killed in the middle of a line
                self._file.write(b"\n")
        self._file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        self._file.flush()

    def _lines(self, start: int) -> Iterator[tuple[dict[str, Any], int]]:
        with self.path.open("rb") as file:
            file.seek(start)
            while (text := file.readline()).endswith(b"\n"):
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError):  # half a line, from a process that was killed while it wrote
                    continue
                if line and isinstance(line, dict):
                    yield line, file.tell()


def find_offline_queues(folder: Path, deep: bool = True) -> list[OfflineQueue]:
    """Every such file in a folder, and if `deep` in its subfolders, the oldest first; or the one that it names."""
    paths = [folder] if folder.is_file() else folder.glob(f"{'**/' if deep else ''}*{_SUFFIX}")
    ages: dict[Path, float] = {}
    for path in paths:
        with suppress(FileNotFoundError):  # another process has sent and removed it meanwhile
            ages[path] = path.stat().st_mtime
    return [OfflineQueue(path) for path in sorted(ages, key=ages.__getitem__)]


def _as_line(kind: str, item: Any) -> dict[str, Any]:
    if kind == "metrics":
        value = item.value if abs(item.value) < float("inf") else str(item.value)  # JSON has no NaN and no infinity
        return {kind: item.key, "value": value, "step": item.step, "timestamp_ms": item.timestamp}
    if kind == "end":
        return {kind: item.key, "value": item.value, "timestamp_ms": item.timestamp_ms}
    return {kind: item.key, "value": item.value}


# How often to send a refused item again, while it is unclear whether the item or the store is at fault.
_RETRIES = 3


def command(folder: Path) -> str:
    """The shell command that sends the files of a folder."""
    return f"azureml-strategy jobs upload-metrics {shlex.quote(str(folder.absolute()))}"


def upload(queue: OfflineQueue, tracking_uri: str) -> str:
    """Send what the store does not have of a held file, delete the file once all is sent, and return the run's id.

    Raises:
        ValueError: the file is not one of ours.
        TrackingError: the store does not have the run, or refuses an item; the file stays.
        StoreAwayError: the store does not answer; the file stays.
    """
    request = queue.request(tracking_uri)
    with store_errors():
        run = request.open(again=True)
    if request.run_id is None:
        queue.opened(run.run_id)
    sender = Sender(run)
    for batch, _ in queue.batches():
        sender.send(batch)
    for _ in range(_RETRIES if sender.suspects else 0):
        time.sleep(SECOND_LOOK_S)
        sender.look_again()
    refused = sender.left_out + len(sender.suspects)
    if refused:
        raise TrackingError(
            f"{refused} item(s) in {queue.path} are refused by {describe_store(tracking_uri)}; all others stand in run "
            f"{run.run_id}. The file stays: delete it if they do not matter."
        )
    queue.remove()
    return run.run_id


class LeftoverQueues:
    """Files that earlier starts left in the run's folder for the same store."""

    def __init__(self, folder: Path, request: RunRequest) -> None:
        self._uri = request.tracking_uri
        self._queues: list[OfflineQueue] = []
        with suppress(OSError):  # an unreadable folder must not stop training
            store = describe_store(self._uri)
            self._queues = [each for each in find_offline_queues(folder, deep=False) if each.store == store]

    def __bool__(self) -> bool:
        return bool(self._queues)

    def send(self) -> None:
        """Send all files. A file that cannot be sent stays, with a warning.

        Raises:
            StoreAwayError: the store does not answer. Another call sends the rest.
        """
        while self._queues:
            queue = self._queues[0]
            try:
                if queue.hold():
                    upload(queue, self._uri)
            except (ValueError, TrackingError, StoreRefusedError, OSError) as error:
                warnings.warn(f"{error} Send it by hand: {command(queue.path)}", stacklevel=2)
            finally:
                queue.close()
            del self._queues[0]


def upload_all(folder: Path, address: Callable[[str], str], print_line: Callable[[str], None]) -> bool:
    """Send every such file in a folder and its subfolders, or the file `folder`. Return whether all were sent.

    A file has the address of its store; `address` returns the one to use in its place.
    """
    queues = find_offline_queues(folder)
    if not queues:
        print_line(f"There are no unsent metrics in {folder.absolute()}.")
    sent = [_upload_and_report(queue, address, print_line) for queue in queues]
    return all(sent)


def _upload_and_report(queue: OfflineQueue, address: Callable[[str], str], print_line: Callable[[str], None]) -> bool:
    try:
        if not queue.hold():
            print_line(f"{queue.path}: another process writes or sends it just now, or has sent it.")
            return False
        _refuse_files_elsewhere(queue)
        run_id = upload(queue, address(queue.store))
    except (OSError, ValueError, TrackingError, StoreAwayError, StoreRefusedError) as error:
        print_line(f"{queue.path}: {error}")
        return False
    finally:
        queue.close()
    print_line(f"{queue.path}: all of it stands in run {run_id}; the file is removed.")
    return True


def _refuse_files_elsewhere(queue: OfflineQueue) -> None:
    """Refuse to send files of this machine that have nothing to do with the run: anyone may have written the lines.

    A line may also name a file of the node on which the run was. On another machine that file is missing, and is left
    out with a warning.

    Raises:
        ValueError: a file is named that lies outside of the queue's folder and the working folder.
    """
    folders = (queue.path.parent.resolve(), Path.cwd())
    named = [each.value for batch, _ in queue.batches() for each in batch.items if isinstance(each, DiskFile)]
    here = [each for each in named if os.path.exists(each)]
    outside = next((each for each in here if not any(map(Path(each).resolve().is_relative_to, folders))), None)
    if outside is not None:
        raise ValueError(
            f"it would send {outside!r}, which lies neither below {folders[0]} nor below {folders[1]}. If that is a "
            "file of the run, type the command in a folder that holds it."
        )
