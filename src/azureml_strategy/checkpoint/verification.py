"""All ranks of a job compare a checkpoint's files with its manifest, each a share of them."""

from __future__ import annotations

import heapq
import itertools
import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from azureml_strategy.checkpoint.manifest import Manifest, StoredFile, content_fault, look

# How long a rank may read its share: a minimum, which slow mounts need to open files, and what a slow reader takes for
# the bytes. A storage account gives 120 Gbit/s to all its readers together, 15 MB/s to each of 1,000 ranks.
_LEAST_SECONDS = 600.0
_SLOWEST_BYTES_PER_SECOND = 10e6
# How long rank 0 waits for others that could take a share. Who comes later takes none, and is told the outcome.
_ARRIVAL_SECONDS = 120.0
# Nodes of a job may start minutes apart.
MEETING_SECONDS = 1800.0
# How long rank 0, whose store goes with it, stays for the others to read why it ends.
_FAREWELL_SECONDS = 10.0


class NotVerifiedError(RuntimeError):
    """A share was not checked in time, or the check itself failed: nobody knows whether the checkpoint is whole."""


def shared_out(files: Mapping[str, StoredFile], ranks: Iterable[int]) -> dict[int, list[str]]:
    """Which rank reads which files, so that each has about as many bytes.

    Args:
        files: of the checkpoint.
        ranks: those that take part.
    """
    loads = [(0, rank) for rank in sorted(ranks)]
    shares: dict[int, list[str]] = {rank: [] for _, rank in loads}
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(name)
        heapq.heappush(loads, (load + max(1, files[name].size), rank))
    return shares


def time_limit(files: Mapping[str, StoredFile], shares: Mapping[int, list[str]]) -> float:
    """Seconds in which the largest share must have been read."""
    largest = max(sum(files[name].size for name in share) for share in shares.values())
    return _LEAST_SECONDS + largest / _SLOWEST_BYTES_PER_SECOND


class Leader:
    """Rank 0, which says what is to be checked, and hears what was found.

    Args:
        store: reached by all ranks, with names that nobody else uses.
        world_size: number of ranks.
    """

    def __init__(self, store: Store, world_size: int) -> None:
        self._store = store
        self._others = range(1, world_size)
        self._round = 0

    def fault(self, manifest: Manifest, folder: Path) -> str | None:
        """Why the content of the files is not what was written, found by all ranks together; None if it is.

        Args:
            manifest: of a checkpoint whose files this rank sees, at their sizes.
            folder: the manifest's.

        Raises:
            NotVerifiedError: a share could not be checked, or was not in time.
        """
        files = manifest.files
        listed = {name: [stored.size, stored.crc32] for name, stored in files.items()}
        self._say("order", {"folder": str(folder), "files": listed})
        shares = shared_out(files, [0, *self._present()])
        seconds = time_limit(files, shares)
        self._say("shares", {"shares": shares, "seconds": seconds})
        deadline = time.monotonic() + seconds
        own = _verdict(folder, {name: files[name] for name in shares[0]}, seconds)
        heard = self._said_by([rank for rank in shares if rank > 0], "verdict", deadline)
        self._round += 1
        return _judged(folder / manifest.name, {0: own, **heard}, seconds)

    def end(self, answer: dict[str, Any], stay: bool = False) -> None:
        """Tell the others the outcome.

        Args:
            answer: what `follow` returns there.
            stay: until they have read it, for a while: this process ends.
        """
        self._say("order", {"answer": answer})
        if stay:
            with suppress(RuntimeError):
                self._store.wait([f"told/{rank}" for rank in self._others], timedelta(seconds=_FAREWELL_SECONDS))

    def _present(self) -> list[int]:
        """The other ranks that see the files."""
        said = self._said_by(self._others, "sees", time.monotonic() + _ARRIVAL_SECONDS)
        return [rank for rank, sees in said.items() if sees]

    def _said_by(self, ranks: Iterable[int], what: str, deadline: float) -> dict[int, Any]:
        """What other ranks said until then; None of those that have not."""
        keys = {rank: f"{self._round}/{what}/{rank}" for rank in ranks}
        with suppress(RuntimeError):  # torch's, where one of them has not come
            self._store.wait(list(keys.values()), timedelta(seconds=max(1.0, deadline - time.monotonic())))
        return {
            rank: json.loads(self._store.get(key)) if self._store.check([key]) else None for rank, key in keys.items()
        }

    def _say(self, what: str, value: Any) -> None:
        self._store.set(f"{self._round}/{what}", json.dumps(value))


def follow(store: Store, rank: int) -> dict[str, Any]:
    """Any other rank: check what rank 0 says, until it has come to an end.

    Args:
        store: the one of `Leader`.
        rank: this process's.

    Returns:
        The answer that rank 0 gave to `Leader.end`.

    Raises:
        NotVerifiedError: rank 0 is gone, or said nothing in time.
    """
    seconds = MEETING_SECONDS
    for number in itertools.count():
        order = _said(store, f"{number}/order", seconds)
        if "answer" in order:
            store.set(f"told/{rank}", "")
            answer: dict[str, Any] = order["answer"]
            return answer
        folder, files = Path(order["folder"]), {name: StoredFile(*each) for name, each in order["files"].items()}
        store.set(f"{number}/sees/{rank}", json.dumps(look(folder, files) is None))
        task = _said(store, f"{number}/shares", _ARRIVAL_SECONDS + _LEAST_SECONDS)
        share = {name: files[name] for name in task["shares"].get(str(rank), ())}
        store.set(f"{number}/verdict/{rank}", json.dumps(_verdict(folder, share, task["seconds"])))
        seconds = task["seconds"] + _LEAST_SECONDS  # rank 0 gives up before
    raise AssertionError("it counts without end")


def _said(store: Store, key: str, seconds: float) -> dict[str, Any]:
    try:
        store.wait([key], timedelta(seconds=seconds))
        said: dict[str, Any] = json.loads(store.get(key))
    except RuntimeError as error:  # torch's: in vain, or the server is gone
        raise NotVerifiedError(
            "Rank 0, which chooses the checkpoint to go on from, has ended, or has said nothing for "
            f"{seconds / 60:,.0f} min. Its log says why (user_logs/std_log_process_0.txt)."
        ) from error
    return said


def _verdict(folder: Path, share: Mapping[str, StoredFile], seconds: float) -> dict[str, str | None]:
    try:
        return {"fault": content_fault(folder, share, time.monotonic() + seconds), "error": None}
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        return {"fault": None, "error": f"{type(error).__name__}: {error}"}


def _judged(path: Path, verdicts: Mapping[int, dict[str, str | None] | None], seconds: float) -> str | None:
    """One fault is enough, whatever became of the other shares."""
    said = {rank: verdict for rank, verdict in verdicts.items() if verdict is not None}
    fault = next((verdict["fault"] for verdict in said.values() if verdict["fault"] is not None), None)
    errors = {rank: verdict["error"] for rank, verdict in said.items() if verdict["error"] is not None}
    errors |= dict.fromkeys(verdicts.keys() - said.keys(), f"it said nothing for {seconds / 60:,.0f} min")
    if fault is not None or not errors:
        return fault
    rank = min(errors)
    raise NotVerifiedError(
        f"Whether {path} is whole is not known: rank {rank} has not checked its share ({errors[rank]}). Start the job "
        "again where its nodes can read the folder; `resume=PATH` names another checkpoint, and `resume=never` starts "
        "anew."
    )
