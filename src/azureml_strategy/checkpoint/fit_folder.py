"""Finds the folder of a fit's checkpoints: below the job's output, and apart from those of the script's other fits."""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import os
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import lightning
from lightning.pytorch import LightningModule, Trainer
from torch.nn.parameter import is_lazy

from azureml_strategy.checkpoint.folder import CheckpointFolder
from azureml_strategy.checkpoint.manifest import write_durably
from azureml_strategy.cluster.emulated import is_emulated
from azureml_strategy.cluster.job import read_job
from azureml_strategy.lightning_internals import frame_of_run

log = logging.getLogger(__name__)

# Azure ML gives each process the path of an output called NAME as AZURE_ML_OUTPUT_NAME; `submit` calls ours `run`.
OUTPUT_VARIABLE = "AZURE_ML_OUTPUT_run"
# The file in a fit's folder that records which fit the folder belongs to.
_FIT = "fit.json"
# What a node mounts from its own disks or memory. Mounts of storage have other types: fuse, nfs4, cifs, lustre.
_OWN_DISKS = ("btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
_process = uuid.uuid4().hex
# Parents of the folders that were warned of.
_warned: set[Path] = set()
_SKIPPED = tuple(f"{folder}{os.sep}" for folder in (Path(str(lightning.__file__)).parent, Path(__file__).parents[1]))


def this_process() -> str:
    """Return what identifies the script's process. The processes that it spawns for a fit get it with their callbacks.

    A forked process that makes callbacks of its own counts as another script's: it may be the next attempt.
    """
    return _process


def _renew_after_fork() -> None:
    global _process
    _process = uuid.uuid4().hex


os.register_at_fork(after_in_child=_renew_after_fork)


def default_folder(root: str) -> Path:
    """Return the folder for checkpoints: below the job's output `run` if it has one, else below another folder.

    Args:
        root: the other folder, the Trainer's `default_root_dir`.
    """
    return Path(os.environ.get(OUTPUT_VARIABLE) or root, "checkpoints")


def warn_of_own_disk(folder: Path) -> None:
    """Warn in a job if a folder is on the node's own disk, where a restart on another node does not find it.

    Nothing is said outside a job, in an emulated one, and where the kind of the disk is not known.

    Args:
        folder: of checkpoints; it need not exist.
    """
    known = folder.parent in _warned or read_job() is None or is_emulated(os.environ)
    if known or _filesystem(folder) not in _OWN_DISKS:
        return
    _warned.add(folder.parent)
    log.warning(
        "Checkpoints go to %s, on this node's own disk: if the job starts again on another node, it does not find them "
        "and trains from the beginning. Give the job an output with the name `run`, which is used by itself, "
        "`outputs: {run: {type: uri_folder, mode: rw_mount}}`; or JobCheckpoint a `dirpath` on a mount.",
        folder,
    )


def _filesystem(folder: Path, table: Path = Path("/proc/self/mounts")) -> str | None:
    """Return the type of the file system that a folder is in; None if that is not known."""
    path = os.path.realpath(folder)
    try:
        mounts = [line.split(" ")[1:3] for line in table.read_text().splitlines()]
    except OSError:
        return None
    above = [(point, kind) for point, kind in mounts if os.path.commonpath((path, point)) == point]
    return max(reversed(above), key=lambda mount: len(mount[0]), default=("", None))[1]


def name_of_fit(trainer: Trainer, module: LightningModule) -> str:
    """Name a fit by what it trains and where the script calls it: the same in all attempts of a job.

    Args:
        trainer: in a callback's `setup`.
        module: what is trained, before it is sharded.
    """
    weights = [(name, None if is_lazy(each) else tuple(each.shape)) for name, each in module.named_parameters()]
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    # file and line of the innermost frame around the fit that is neither Lightning's nor ours
    frames = traceback.walk_stack(frame_of_run(trainer) or inspect.currentframe())
    callers = ((frame.f_code.co_filename, line) for frame, line in frames)
    caller = next((f"{os.path.basename(file)}:{line}" for file, line in callers if not file.startswith(_SKIPPED)), "?")
    return f"{kind} {crc32(repr(weights).encode()):08x} at {caller}"


def folder_of_fit(
    base: Path, fit: str, process: str, in_place: bool, usable: Callable[[Path], bool] = lambda folder: True
) -> Path:
    """Take a folder for a fit: the one of an earlier attempt, or a new one. Only rank 0 calls this.

    Fits that share a folder would go on from one another. So the first fit of a process gets `base`, and others get
    `base_2`, `base_3` and so on. Which one is known by the fit's name, not by its number, as a restarted script may
    skip what it has done; equally named ones, as of a loop, are told apart by their order.

    Args:
        base: the folder for one fit.
        fit: `name_of_fit`.
        process: `this_process()` of the script.
        in_place: whether the place of the call counts, which changes when a script is edited.
        usable: whether a folder's content permits to use it.

    Raises:
        OSError: the folder cannot be read or written.
    """
    fallback = None
    numbered = (base.with_name(f"{base.name}_{number}") for number in itertools.count(2))
    for folder in itertools.chain([base], numbered):
        recorded, by = _read(folder)
        if by == process or not usable(folder):
            continue
        if recorded is not None:
            same_model = recorded.partition(" at ")[0] == fit.partition(" at ")[0]
            if same_model and (recorded == fit or not in_place):
                break
        fallback = fallback or (folder if recorded is None else None)
        if not folder.exists():
            assert fallback is not None
            folder = fallback
            break
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / _FIT, json.dumps({"fit": fit, "process": process}))
    if folder != base:
        log.info("Checkpoints of this fit go to %s, as %s is for another one.", folder, base)
    return folder


def is_of_this_run(folder: Path, run_id: str | None) -> bool:
    """Tell whether the newest checkpoint in a folder, if any, was written by this run or outside a job.

    Args:
        folder: of checkpoints; it need not exist.
        run_id: of this run; None outside a job, where any will do.
    """
    complete = CheckpointFolder(folder).complete()
    return run_id is None or not complete or complete[0].run_id in (None, run_id)


def _read(folder: Path) -> tuple[str | None, str | None]:
    """Return the fit that a folder is for, and the process that took it last; None if the folder has no record."""
    try:
        content = json.loads((folder / _FIT).read_text(encoding="utf-8"))
        return str(content["fit"]), str(content["process"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # a torn record counts as none
        return None, None
