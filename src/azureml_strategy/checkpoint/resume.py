"""From which checkpoint a restarted job goes on."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from azureml_strategy.checkpoint.manifest import EarlierVersionError, Manifest, manifest_path, manifests
from azureml_strategy.checkpoint.storage_folder import newest_first
from azureml_strategy.cluster import Launch, detect_launch
from azureml_strategy.network.rendezvous import open_store

log = logging.getLogger(__name__)

AUTO, NEVER = "auto", "never"
# Rank 0 reads every byte of a checkpoint while the others wait.
_TIMEOUT = timedelta(minutes=30)
# How long a mount may take to show one node what another one sees.
_VISIBLE_SECONDS = 120.0
_POLL_SECONDS = 0.5
# What a process tells those that its strategy starts on this node.
_CHOICE = "AZUREML_STRATEGY_RESUME"
# A process may train several times, in a sweep; all ranks count the same.
_choices = itertools.count()
# Rank 0 serves the store, in which others may look after it went on.
_kept_open: list[object] = []


class ResumeError(ValueError):
    """The checkpoint that was asked for cannot be resumed from."""


def checkpoint_to_resume(resume: str, folder: Path) -> Path | None:
    """The checkpoint to go on from, the same one on all ranks: rank 0 chooses.

    Args:
        resume: `auto` for the newest one below the folder whose files are those of its manifest, None if there is
            none; `never`; or the path of a checkpoint.
        folder: the run's output.

    Raises:
        ResumeError: the path that was given does not exist, its files are not those of its manifest, or this rank
            does not see the checkpoint that rank 0 chose.
        LaunchError: the ranks of the job cannot meet.
    """
    if _CHOICE in os.environ:
        return Path(os.environ[_CHOICE]) if os.environ[_CHOICE] else None
    if resume == NEVER:
        return None
    if resume != AUTO:
        return _given(Path(resume))
    folder = folder.absolute()
    launch = detect_launch()
    if launch is None or launch.world_size == 1:
        return newest_valid(folder)
    return _agreed(launch, folder)


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


def newest_valid(folder: Path) -> Path | None:
    """The newest checkpoint below a folder that is whole; each one that is not gets a line that says why."""
    found = {path: _readable(path) for path in _below(folder)}
    complete = {manifest: path.parent for path, manifest in found.items() if manifest is not None}
    for manifest in newest_first(complete):
        fault = manifest.fault(complete[manifest])
        if fault is None:
            log.info("Going on from %s: step %d.", complete[manifest] / manifest.name, manifest.step)
            return complete[manifest] / manifest.name
        log.warning("Checkpoint %s is left out: %s.", complete[manifest] / manifest.name, fault)
    if found:
        log.warning("None of the %d checkpoint(s) below %s is whole: training starts anew.", len(found), folder)
    return None


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


def _given(path: Path) -> Path:
    if not path.exists():
        raise ResumeError(
            f"resume={path}, but there is nothing. Give the path of a checkpoint, a file or a folder; `resume={AUTO}` "
            f"looks for the newest below output_dir, and `resume={NEVER}` starts anew."
        )
    try:
        manifest = Manifest.of(path)
    except (ValueError, OSError) as error:
        raise ResumeError(f"resume={path}, but its manifest cannot be read: {error}. Give another one.") from error
    fault = manifest.fault(path.parent) if manifest is not None else None
    if fault is not None:
        raise ResumeError(f"resume={path}, but this checkpoint is damaged: {fault}. Give another one.")
    return path


def _agreed(launch: Launch, folder: Path) -> Path | None:
    """Rank 0's choice. Lightning wants to be told before there is a process group; the store is there earlier."""
    store = open_store(launch, _TIMEOUT, f"resume/{next(_choices)}")
    if launch.rank == 0:
        chosen = newest_valid(folder)
        store.set("resume", str(chosen or ""))
        _kept_open.append(store)
        return chosen
    store.wait(["resume"], _TIMEOUT)
    answer = store.get("resume").decode()
    return _visible(Path(answer), launch.rank) if answer else None


def _visible(path: Path, rank: int) -> Path:
    """Wait until this node sees the files that rank 0 has checked."""
    deadline, fault = time.monotonic() + _VISIBLE_SECONDS, "its manifest is missing"
    while time.monotonic() < deadline:
        if manifest_path(path).is_file():
            found = Manifest.read(manifest_path(path)).fault(path.parent, content=False)
            if found is None:
                return path
            fault = found
        time.sleep(_POLL_SECONDS)
    raise ResumeError(
        f"Rank 0 goes on from {path}, but rank {rank} does not see it: {fault}. All nodes need the same output_dir on "
        f"a mount, as `job.outputs.run` is; `resume={NEVER}` starts anew."
    )
