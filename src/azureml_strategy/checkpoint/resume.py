"""Finds the newest valid checkpoint of a restarted job, and verifies all its files before it is loaded.

Rank 0 chooses the checkpoint. Each rank verifies a share of its files. They exchange messages in the rendezvous store.
"""

from __future__ import annotations

import heapq
import itertools
import json
import logging
import os
import time
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from azureml_strategy.checkpoint.folder import newest_first, this_run
from azureml_strategy.checkpoint.manifest import (
    Manifest,
    OldVersionError,
    StoredFile,
    content_fault,
    look,
    manifest_path,
    manifests,
)
from azureml_strategy.cluster import Launch, learn_launch
from azureml_strategy.control.gather import GroupExchange, gather
from azureml_strategy.control.rendezvous import another_connection, open_store
from azureml_strategy.control.store import StepError

# Time limit for a rank to read its share: a minimum, which slow mounts need to open files, plus the time of a slow
# reader. A storage account gives 120 Gbit/s to all its readers together, 15 MB/s to each of 1,000 ranks.
_LEAST_SECONDS = 600.0
_SLOWEST_BYTES_PER_SECOND = 10e6
# How long rank 0 waits for ranks that can take a share. A rank that comes later takes none and learns the outcome.
_ARRIVAL_SECONDS = 120.0
# Nodes of a job may start minutes apart.
MEETING_SECONDS = 1800.0
# How long rank 0 stays when it fails, so that the others can read why. It serves the store, which ends with it.
_LAST_READ_SECONDS = 10.0

log = logging.getLogger(__name__)
AUTO, ANY, NEVER = "auto", "any", "never"
# How long a mount may take to show one node what another one sees.
_VISIBLE_SECONDS = 120.0
_POLL_SECONDS = 0.5
# Environment variable that hands the choice to processes that a strategy starts on this node.
_CHOICE = "AZUREML_STRATEGY_RESUME"
# A process may train several times, as in a sweep. All ranks count alike.
_choices = itertools.count()
# Rank 0 serves the store and must keep it open: other ranks may still read from it after rank 0 has gone on.
_kept_open: list[object] = []
Check = Callable[[Manifest, Path], "str | None"]
"""Returns why the content of a checkpoint in a folder is not what was written, or None if it is."""


class NotVerifiedError(RuntimeError):
    """A share was not checked in time, or could not be checked: it is unknown whether the checkpoint is whole."""


def distribute_files(files: Mapping[str, StoredFile], ranks: Iterable[int]) -> dict[int, list[str]]:
    """Distribute the names of files over ranks, so that each rank reads about as many bytes."""
    loads = [(0, rank) for rank in sorted(ranks)]
    shares: dict[int, list[str]] = {rank: [] for _, rank in loads}
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(name)
        heapq.heappush(loads, (load + max(1, files[name].size), rank))
    return shares


def time_limit(files: Mapping[str, StoredFile], shares: Mapping[int, list[str]]) -> float:
    """Seconds within which the largest share must be read."""
    largest = max(sum(files[name].size for name in share) for share in shares.values())
    return _LEAST_SECONDS + largest / _SLOWEST_BYTES_PER_SECOND


class Leader:
    """Rank 0, which hands out the shares and collects the verdicts, in a store whose keys nobody else uses."""

    def __init__(self, store: Store, world_size: int) -> None:
        self._store = store
        self._others = range(1, world_size)
        self._round = 0

    def fault(self, manifest: Manifest, folder: Path) -> str | None:
        """Have all ranks verify the files of a checkpoint together, which this rank sees with the right sizes.

        Return why their content is not what was written, or None.

        Raises:
            NotVerifiedError: a share could not be checked, or not in time.
        """
        files = manifest.files
        listed = {name: [stored.size, stored.crc32] for name, stored in files.items()}
        self._send("order", {"folder": str(folder), "files": listed})
        sees = self._received(self._others, "sees", time.monotonic() + _ARRIVAL_SECONDS)
        shares = distribute_files(files, [0, *(rank for rank, has_files in sees.items() if has_files)])
        seconds = time_limit(files, shares)
        self._send("shares", {"shares": shares, "seconds": seconds})
        deadline = time.monotonic() + seconds
        verdict = _verdict(folder, {name: files[name] for name in shares[0]}, seconds)
        others = self._received([rank for rank in shares if rank > 0], "verdict", deadline)
        self._round += 1
        return _combined(folder / manifest.name, {0: verdict, **others}, seconds)

    def end(self, answer: dict[str, Any], stay: bool = False) -> None:
        """Send the answer that `follow` returns on the other ranks.

        With `stay`, wait a while until they have read it, because this process is about to end.
        """
        self._send("order", {"answer": answer})
        if stay:
            with suppress(RuntimeError):
                self._store.wait([f"told/{rank}" for rank in self._others], timedelta(seconds=_LAST_READ_SECONDS))

    def _received(self, ranks: Iterable[int], what: str, deadline: float) -> dict[int, Any]:
        """Return what other ranks have sent by the deadline; None for those that sent nothing."""
        keys = {rank: f"{self._round}/{what}/{rank}" for rank in ranks}
        with suppress(RuntimeError):  # torch's, if one of them has not come
            self._store.wait(list(keys.values()), timedelta(seconds=max(1.0, deadline - time.monotonic())))
        return {
            rank: json.loads(self._store.get(key)) if self._store.check([key]) else None for rank, key in keys.items()
        }

    def _send(self, what: str, value: Any) -> None:
        self._store.set(f"{self._round}/{what}", json.dumps(value))


def follow(store: Store, rank: int) -> dict[str, Any]:
    """On every rank but 0: check the shares that rank 0 hands out, until it sends an answer, which is returned.

    Raises:
        NotVerifiedError: rank 0 is gone, or sent nothing in time.
    """
    seconds = MEETING_SECONDS
    for number in itertools.count():
        order = _receive(store, f"{number}/order", seconds)
        if "answer" in order:
            store.set(f"told/{rank}", "")
            answer: dict[str, Any] = order["answer"]
            return answer
        folder, files = Path(order["folder"]), {name: StoredFile(*each) for name, each in order["files"].items()}
        store.set(f"{number}/sees/{rank}", json.dumps(look(folder, files) is None))
        task = _receive(store, f"{number}/shares", _ARRIVAL_SECONDS + _LEAST_SECONDS)
        share = {name: files[name] for name in task["shares"].get(str(rank), ())}
        store.set(f"{number}/verdict/{rank}", json.dumps(_verdict(folder, share, task["seconds"])))
        seconds = task["seconds"] + _LEAST_SECONDS  # longer than rank 0 itself waits
    raise AssertionError("it counts without end")


def _receive(store: Store, key: str, seconds: float) -> dict[str, Any]:
    """Wait for what rank 0 sends under a key.

    Raises:
        NotVerifiedError: rank 0 is gone, or sent nothing in time.
    """
    try:
        store.wait([key], timedelta(seconds=seconds))
        received: dict[str, Any] = json.loads(store.get(key))
    except RuntimeError as error:  # torch's: the wait timed out, or the server is gone
        raise NotVerifiedError(
            "Rank 0, which chooses the checkpoint to go on from, has ended, or has said nothing for "
            f"{seconds / 60:,.0f} min. Its log says why (user_logs/std_log_process_0.txt)."
        ) from error
    return received


def _verdict(folder: Path, share: Mapping[str, StoredFile], seconds: float) -> dict[str, str | None]:
    try:
        return {"fault": content_fault(folder, share, time.monotonic() + seconds), "error": None}
    except Exception as error:  # the other ranks must not wait for this one, whatever has failed
        return {"fault": None, "error": f"{type(error).__name__}: {error}"}


def _combined(path: Path, verdicts: Mapping[int, dict[str, str | None] | None], seconds: float) -> str | None:
    """Combine the verdicts. One fault is enough, whatever happened to the other shares."""
    known = {rank: verdict for rank, verdict in verdicts.items() if verdict is not None}
    fault = next((verdict["fault"] for verdict in known.values() if verdict["fault"] is not None), None)
    errors = {rank: verdict["error"] for rank, verdict in known.items() if verdict["error"] is not None}
    errors |= dict.fromkeys(verdicts.keys() - known.keys(), f"it said nothing for {seconds / 60:,.0f} min")
    if fault is not None or not errors:
        return fault
    rank = min(errors)
    raise NotVerifiedError(
        f"Whether {path} is whole is not known: rank {rank} has not checked its share ({errors[rank]}). Start the job "
        "again where its nodes can read the folder; `resume=PATH` names another checkpoint, and `resume=never` starts "
        "anew."
    )


class ResumeError(ValueError):
    """The run cannot resume from the checkpoint that was asked for."""


def checkpoint_to_resume(resume: str, folder: Path) -> Path | None:
    """Choose the checkpoint to resume from, the same on all ranks.

    Rank 0 chooses, and each rank checks a share of its files.

    Args:
        resume: `auto` for the newest checkpoint below the folder whose files match its manifest, or None if there is
            none; `any` for the same, whichever Azure ML run wrote it; `never`; or the path of a checkpoint.
        folder: the run's output.

    Raises:
        ResumeError: under `auto`, the newest one belongs to another run; the given path does not exist, or its files do
            not match its manifest; the check failed or took too long; or this rank does not see the checkpoint that
            rank 0 chose.
        LaunchError: the ranks of the job cannot meet.
    """
    if _CHOICE in os.environ:
        return Path(os.environ[_CHOICE]) if os.environ[_CHOICE] else None
    if resume == NEVER:
        return None
    launch = learn_launch()
    if launch is None or launch.world_size == 1:
        return _choose(resume, folder, _check_alone)
    return _choose_before_group(launch, resume, folder)


def choose_together(resume: str, folder: Path, rank: int, world_size: int) -> Path | None:
    """Choose like `checkpoint_to_resume`, for the ranks of the running process group; a collective.

    `world_size` is the Trainer's, which may run alone while a process group exists. A ResumeError is raised on all
    ranks.
    """
    if resume == NEVER:
        return None
    if world_size == 1:
        return _choose(resume, folder, _check_alone)
    store = another_connection(world_size, timedelta(seconds=MEETING_SECONDS))
    ranks = gather((store is not None, uuid.uuid4().hex))
    if store is not None and all(connected for connected, _ in ranks):
        own_keys = PrefixStore(f"azureml_strategy/resume/{ranks[0][1]}", store)
        return _choose_through(own_keys, rank, world_size, resume, folder)
    try:  # ranks without a common store wait in a collective while rank 0 reads all files
        chosen: Path | None = GroupExchange(rank).on_rank_zero(lambda: _choose(resume, folder, _check_alone))
    except StepError as error:
        raise ResumeError(str(error)) from error
    return chosen if chosen is None or rank == 0 else _visible(chosen, rank, with_manifest=False)


@contextmanager
def children_resume_from(chosen: Path | None) -> Iterator[None]:
    """Make processes that start inside the context resume from this checkpoint. They choose none themselves."""
    if _CHOICE in os.environ:  # this is one of them
        yield
        return
    os.environ[_CHOICE] = str(chosen or "")
    try:
        yield
    finally:
        os.environ.pop(_CHOICE, None)


def forget_choice() -> None:
    """Have this process, and those that it starts from now on, such as a run within a run, choose for themselves.

    Call it in a callback's `setup`, when the processes of the fit have started.
    """
    os.environ.pop(_CHOICE, None)


def _check_alone(manifest: Manifest, folder: Path) -> str | None:
    return content_fault(folder, manifest.files)


def newest_valid(folder: Path, check: Check = _check_alone, run_id: str | None = None) -> Path | None:
    """Return the newest checkpoint below a folder that is whole. Each one that is not is logged with the reason.

    The folder's own manifests count, and those of its direct subfolders.

    Raises:
        ResumeError: the newest one belongs to another run than `run_id`. With None, the run does not matter.
    """
    paths = [path for each in (folder, *sorted(folder.glob("*/"))) for path in manifests(each)]
    found = {path: _readable(path) for path in paths}
    complete = {manifest: path.parent for path, manifest in found.items() if manifest is not None}
    for manifest in newest_first(complete):
        fault = look(complete[manifest], manifest.files)
        if fault is None and None not in (manifest.run_id, run_id) and manifest.run_id != run_id:
            # Outside of a job, whoever uses the folder may read what is in it.
            raise ResumeError(
                f"The newest checkpoint in {complete[manifest]} is {manifest.name} of run {manifest.run_id}, and this "
                f"is run {run_id}: two runs in one folder would go on from one another. Give another output_dir. Or "
                f"type `resume={ANY}` to go on from the newest one whoever wrote it, the path of a checkpoint as "
                f"`resume=PATH`, or `resume={NEVER}` to start anew beside them."
            )
        if fault is None:
            fault = check(manifest, complete[manifest])
        if fault is None:
            log.info("Going on from %s: step %d.", complete[manifest] / manifest.name, manifest.step)
            return complete[manifest] / manifest.name
        log.warning("Checkpoint %s is left out: %s.", complete[manifest] / manifest.name, fault)
    if found:
        log.warning("None of the %d checkpoint(s) below %s is whole: training starts anew.", len(found), folder)
    return None


def _readable(path: Path) -> Manifest | None:
    try:
        return Manifest.read(path)
    except OldVersionError as error:
        log.warning("Checkpoint manifest %s is left out: %s; `resume=PATH` takes what it lists unchecked.", path, error)
    except (ValueError, OSError) as error:
        log.warning("Checkpoint manifest %s is left out: %s.", path, error)
    return None


def _choose(resume: str, folder: Path, check: Check) -> Path | None:
    if resume in (AUTO, ANY):
        return newest_valid(folder.absolute(), check, this_run() if resume == AUTO else None)
    return _require_valid(Path(resume), check)


def _require_valid(path: Path, check: Check) -> Path:
    if not path.exists():
        raise ResumeError(
            f"resume={path}, but there is nothing. Give the path of a checkpoint, a file or a folder; `resume={AUTO}` "
            f"looks for the newest below output_dir, and `resume={NEVER}` starts anew."
        )
    try:
        manifest = Manifest.of(path)
    except (ValueError, OSError) as error:
        raise ResumeError(f"resume={path}, but its manifest cannot be read: {error}. Give another one.") from error
    if manifest is None and not manifest_path(path).exists() and not _may_be_torchs(path):
        raise ResumeError(
            f"resume={path}, but this is no checkpoint: it has no manifest, and is neither a folder nor a whole file "
            f"as torch.save writes it. Give another one, or `resume={AUTO}` for this run's newest."
        )
    fault = None if manifest is None else look(path.parent, manifest.files) or check(manifest, path.parent)
    if fault is not None:
        raise ResumeError(f"resume={path}, but this checkpoint is damaged: {fault}. Give another one.")
    return path


def _may_be_torchs(path: Path) -> bool:
    """Whether torch.load could read it: a zip archive, or a pickle as before torch 1.6, which starts with 0x80."""
    if path.is_dir() or zipfile.is_zipfile(path):
        return True
    with path.open("rb") as file:
        return file.read(1) == b"\x80"


def _choose_before_group(launch: Launch, resume: str, folder: Path) -> Path | None:
    """Agree on rank 0's choice through the store, because Lightning needs it before there is a process group."""
    store = open_store(launch, timedelta(seconds=MEETING_SECONDS), f"resume/{next(_choices)}")
    if launch.rank == 0:
        _kept_open.append(store)
    return _choose_through(store, launch.rank, launch.world_size, resume, folder)


def _choose_through(store: Store, rank: int, world_size: int, resume: str, folder: Path) -> Path | None:
    try:
        if rank > 0:
            answer = follow(store, rank)
            if "error" in answer:
                raise ResumeError(answer["error"])
            return None if answer["path"] is None else _visible(Path(answer["path"]), rank, answer["manifest"])
        return _lead(Leader(store, world_size), resume, folder)
    except NotVerifiedError as error:
        raise ResumeError(str(error)) from error


def _lead(leader: Leader, resume: str, folder: Path) -> Path | None:
    try:
        chosen = _choose(resume, folder, leader.fault)
    except Exception as error:  # the others must not wait, whatever has failed
        leader.end({"error": str(error)}, stay=True)
        raise
    with_manifest = chosen is not None and manifest_path(chosen).is_file()
    leader.end({"path": None if chosen is None else str(chosen), "manifest": with_manifest})
    return chosen


def _visible(path: Path, rank: int, with_manifest: bool = True) -> Path:
    """Wait until this node sees the files that were checked."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while (fault := _missing_here(path, with_manifest)) is not None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if fault is None:
        return path
    raise ResumeError(
        f"Rank 0 goes on from {path}, but rank {rank} does not see it: {fault}. All nodes need the same output_dir on "
        f"a mount, as `job.outputs.run` is; `resume={NEVER}` starts anew."
    )


def _missing_here(path: Path, with_manifest: bool) -> str | None:
    if with_manifest and not manifest_path(path).is_file():
        return "its manifest is missing"
    try:
        manifest = Manifest.of(path)
    except (ValueError, OSError) as error:
        return f"its manifest cannot be read ({error})"
    if manifest is None:
        return None if path.exists() else "it is missing"
    return look(path.parent, manifest.files)
