"""From which checkpoint a restarted job goes on."""

from __future__ import annotations

import itertools
import logging
import os
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from azureml_strategy.checkpoint.manifest import (
    EarlierVersionError,
    Manifest,
    content_fault,
    look,
    manifest_path,
    manifests,
)
from azureml_strategy.checkpoint.storage_folder import newest_first, this_run
from azureml_strategy.checkpoint.verification import MEETING_SECONDS, Leader, NotVerifiedError, follow
from azureml_strategy.cluster import Launch, detect_launch
from azureml_strategy.network.rendezvous import open_store

log = logging.getLogger(__name__)

AUTO, ANY, NEVER = "auto", "any", "never"
# How long a mount may take to show one node what another one sees.
_VISIBLE_SECONDS = 120.0
_POLL_SECONDS = 0.5
# What a process tells those that its strategy starts on this node.
_CHOICE = "AZUREML_STRATEGY_RESUME"
# A process may train several times, in a sweep; all ranks count the same.
_choices = itertools.count()
# Rank 0 serves the store, in which others may look after it went on.
_kept_open: list[object] = []

Check = Callable[[Manifest, Path], "str | None"]
"""Says why the content of a checkpoint in a folder is not what was written; None if it is."""


class ResumeError(ValueError):
    """The checkpoint that was asked for cannot be resumed from."""


def checkpoint_to_resume(resume: str, folder: Path) -> Path | None:
    """The checkpoint to go on from, the same one on all ranks: rank 0 chooses, and all check their share of its files.

    Args:
        resume: `auto` for the newest one below the folder whose files are those of its manifest, None if there is
            none; `any` for the same, whichever Azure ML run wrote it; `never`; or the path of a checkpoint.
        folder: the run's output.

    Raises:
        ResumeError: under `auto`, the newest one is of another run; the path that was given does not exist, or its
            files are not those of its manifest; the check failed or took too long; or this rank does not see the
            checkpoint that rank 0 chose.
        LaunchError: the ranks of the job cannot meet.
    """
    if _CHOICE in os.environ:
        return Path(os.environ[_CHOICE]) if os.environ[_CHOICE] else None
    if resume == NEVER:
        return None
    launch = detect_launch()
    if launch is None or launch.world_size == 1:
        return _chosen(resume, folder, _alone)
    return _agreed(launch, resume, folder)


@contextmanager
def told_to_children(chosen: Path | None) -> Iterator[None]:
    """Processes started in here go on from this checkpoint too, instead of choosing for themselves."""
    if _CHOICE in os.environ:  # this is one of them
        yield
        return
    os.environ[_CHOICE] = str(chosen or "")
    try:
        yield
    finally:
        os.environ.pop(_CHOICE, None)


def _alone(manifest: Manifest, folder: Path) -> str | None:
    return content_fault(folder, manifest.files)


def newest_valid(folder: Path, check: Check = _alone, run_id: str | None = None) -> Path | None:
    """The newest checkpoint below a folder that is whole; each one that is not gets a line that says why.

    Args:
        folder: its own manifests count, and those of the folders in it.
        check: of the files' content.
        run_id: of this run; None if the run does not matter.

    Raises:
        ResumeError: the newest one is of another run.
    """
    found = {path: _readable(path) for path in _below(folder)}
    complete = {manifest: path.parent for path, manifest in found.items() if manifest is not None}
    for manifest in newest_first(complete):
        fault = look(complete[manifest], manifest.files)
        if fault is None:
            _require_same_run(manifest, complete[manifest], run_id)
            fault = check(manifest, complete[manifest])
        if fault is None:
            log.info("Going on from %s: step %d.", complete[manifest] / manifest.name, manifest.step)
            return complete[manifest] / manifest.name
        log.warning("Checkpoint %s is left out: %s.", complete[manifest] / manifest.name, fault)
    if found:
        log.warning("None of the %d checkpoint(s) below %s is whole: training starts anew.", len(found), folder)
    return None


def _require_same_run(manifest: Manifest, folder: Path, run_id: str | None) -> None:
    """One that was written outside a job, or is read there, belongs to whoever uses the folder."""
    if None in (manifest.run_id, run_id) or manifest.run_id == run_id:
        return
    raise ResumeError(
        f"The newest checkpoint in {folder} is {manifest.name} of run {manifest.run_id}, and this is run {run_id}: two "
        f"runs in one folder would go on from one another. Give another output_dir. Or type `resume={ANY}` to go on "
        f"from the newest one whoever wrote it, the path of a checkpoint as `resume=PATH`, or `resume={NEVER}` to "
        "start anew beside them."
    )


def _below(folder: Path) -> list[Path]:
    return [path for each in (folder, *sorted(folder.glob("*/"))) for path in manifests(each)]


def _readable(path: Path) -> Manifest | None:
    try:
        return Manifest.read(path)
    except EarlierVersionError as error:
        log.warning("Checkpoint manifest %s is left out: %s; `resume=PATH` takes what it lists unchecked.", path, error)
    except (ValueError, OSError) as error:
        log.warning("Checkpoint manifest %s is left out: %s.", path, error)
    return None


def _chosen(resume: str, folder: Path, check: Check) -> Path | None:
    if resume in (AUTO, ANY):
        return newest_valid(folder.absolute(), check, this_run() if resume == AUTO else None)
    return _given(Path(resume), check)


def _given(path: Path, check: Check) -> Path:
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


def _agreed(launch: Launch, resume: str, folder: Path) -> Path | None:
    """Rank 0's choice. Lightning wants to be told before there is a process group; the store is there earlier."""
    store = open_store(launch, timedelta(seconds=MEETING_SECONDS), f"resume/{next(_choices)}")
    try:
        if launch.rank > 0:
            return _told(follow(store, launch.rank), launch.rank)
        _kept_open.append(store)
        return _lead(Leader(store, launch.world_size), resume, folder)
    except NotVerifiedError as error:
        raise ResumeError(str(error)) from error


def _lead(leader: Leader, resume: str, folder: Path) -> Path | None:
    try:
        chosen = _chosen(resume, folder, leader.fault)
    except Exception as error:  # whatever it is, the others must not wait for it
        leader.end({"error": str(error)}, stay=True)
        raise
    with_manifest = chosen is not None and manifest_path(chosen).is_file()
    leader.end({"path": None if chosen is None else str(chosen), "manifest": with_manifest})
    return chosen


def _told(answer: dict[str, Any], rank: int) -> Path | None:
    if "error" in answer:
        raise ResumeError(answer["error"])
    return None if answer["path"] is None else _visible(Path(answer["path"]), rank, answer["manifest"])


def _visible(path: Path, rank: int, with_manifest: bool = True) -> Path:
    """Wait until this node sees the files that were checked."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while (fault := _unseen(path, with_manifest)) is not None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if fault is None:
        return path
    raise ResumeError(
        f"Rank 0 goes on from {path}, but rank {rank} does not see it: {fault}. All nodes need the same output_dir on "
        f"a mount, as `job.outputs.run` is; `resume={NEVER}` starts anew."
    )


def _unseen(path: Path, with_manifest: bool) -> str | None:
    if with_manifest and not manifest_path(path).is_file():
        return "its manifest is missing"
    try:
        manifest = Manifest.of(path)
    except (ValueError, OSError) as error:
        return f"its manifest cannot be read ({error})"
    if manifest is None:
        return None if path.exists() else "it is missing"
    return look(path.parent, manifest.files)
