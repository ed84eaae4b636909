"""Makes a fit resume by itself: finds the folder of its checkpoints below the job's output, apart from those of the
script's other fits, and resumes from the newest one as if `fit` had been given its path.
"""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import os
import traceback
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal
from zlib import crc32

import lightning
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torch.nn.parameter import is_lazy

from azureml_strategy.checkpoint.builtin_callbacks import callbacks_of
from azureml_strategy.checkpoint.elastic import ElasticRestart
from azureml_strategy.checkpoint.folder import CheckpointFolder, this_run
from azureml_strategy.checkpoint.manifest import write_durably
from azureml_strategy.checkpoint.resume import ANY, AUTO, ResumeError, choose_together
from azureml_strategy.cluster.emulated import is_emulated
from azureml_strategy.cluster.job import read_job
from azureml_strategy.control.gather import GroupExchange
from azureml_strategy.control.store import StepError
from azureml_strategy.files import filesystem_of
from azureml_strategy.interfaces import ContinuesRun
from azureml_strategy.lightning_internals import frame_of_run, given_checkpoint, only_searches, restore_from

log = logging.getLogger(__name__)

# Azure ML gives each process the path of an output called NAME as AZURE_ML_OUTPUT_NAME; `submit` calls ours `run`.
OUTPUT_VARIABLE = "AZURE_ML_OUTPUT_run"
# The file in a fit's folder that records which fit the folder belongs to.
_FIT = "fit.json"
# Types of file systems on a node's own disks or in its memory. Mounts of storage are fuse, nfs4, cifs or lustre.
_OWN_DISKS = ("btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
_process = uuid.uuid4().hex
# The parents of the folders that a warning has named.
_warned: set[Path] = set()
_SKIPPED = tuple(f"{folder}{os.sep}" for folder in (Path(str(lightning.__file__)).parent, Path(__file__).parents[1]))
ReadContext = Callable[[], AbstractContextManager[None]]


def this_process() -> str:
    """Return the id of the script's process. Processes that it spawns for a fit get the id with their callbacks.

    A forked process that makes callbacks of its own counts as another script's. It may be the next attempt.
    """
    return _process


def _renew_after_fork() -> None:
    global _process
    _process = uuid.uuid4().hex


os.register_at_fork(after_in_child=_renew_after_fork)


def default_folder(root: str) -> Path:
    """Return the folder for checkpoints: below the job's output `run`, or below the Trainer's `default_root_dir`."""
    return Path(os.environ.get(OUTPUT_VARIABLE) or root, "checkpoints")


def warn_of_own_disk(folder: Path) -> None:
    """Warn in a job if a folder is on the node's own disk, where a restart on another node does not find it.

    There is no warning outside a job, in an emulated job, and where the kind of the disk is not known. The folder need
    not exist.
    """
    known = folder.parent in _warned or read_job() is None or is_emulated(os.environ)
    if known or filesystem_of(folder) not in _OWN_DISKS:
        return
    _warned.add(folder.parent)
    log.warning(
        "Checkpoints go to %s, on this node's own disk: if the job starts again on another node, it does not find them "
        "and trains from the beginning. Give the job an output with the name `run`, which is used by itself, "
        "`outputs: {run: {type: uri_folder, mode: rw_mount}}`; or JobCheckpoint a `dirpath` on a mount.",
        folder,
    )


def name_of_fit(trainer: Trainer, module: LightningModule) -> str:
    """Name a fit by what it trains and where the script calls it: the same in all attempts of a job.

    Call it in a callback's `setup`, before the module is sharded.
    """
    weights = [(name, None if is_lazy(each) else tuple(each.shape)) for name, each in module.named_parameters()]
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    # The caller is the innermost frame around the fit that is neither Lightning's nor ours.
    frames = traceback.walk_stack(frame_of_run(trainer) or inspect.currentframe())
    callers = ((frame.f_code.co_filename, line) for frame, line in frames)
    caller = next((f"{os.path.basename(file)}:{line}" for file, line in callers if not file.startswith(_SKIPPED)), "?")
    return f"{kind} {crc32(repr(weights).encode()):08x} at {caller}"


def folder_of_fit(
    base: Path, fit: str, process: str, in_place: bool, usable: Callable[[Path], bool] = lambda folder: True
) -> Path:
    """Take a folder for a fit: that of an earlier attempt, or a new one. Only rank 0 calls this.

    Fits that share a folder would resume from one another's checkpoints. So the first fit of a process gets `base`, and
    others get `base_2`, `base_3` and so on. A restarted script may skip fits that are complete, so a fit finds its
    folder by its name, not by its number. Fits of one name, as in a loop, take their folders in their order.

    Args:
        base: the folder for one fit.
        fit: `name_of_fit`.
        process: `this_process()` of the script.
        in_place: whether the place of the call must be the same. It changes when a script is edited.
        usable: whether the content of a folder permits its use.
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
    """Whether the newest checkpoint in a folder, if any, was written by this run or outside a job.

    The folder need not exist. Outside a job, where `run_id` is None, it is always true.
    """
    complete = CheckpointFolder(folder).complete()
    return run_id is None or not complete or complete[0].run_id in (None, run_id)


def _read(folder: Path) -> tuple[str | None, str | None]:
    """Return the fit that a folder belongs to, and the process that took it last; None if the folder has no record."""
    try:
        content = json.loads((folder / _FIT).read_text(encoding="utf-8"))
        return str(content["fit"]), str(content["process"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # a half-written record counts as none
        return None, None


class FitResume:
    """Chooses the checkpoint that a fit resumes from, and hands it to Lightning, to the loggers and to the Trainer.

    Args:
        resume: as in `checkpoint_to_resume`: `auto`, `any`, `never`, or the path of a checkpoint.
        global_batch: as in `ElasticRestart`.
        skip_other_runs: pass over folders with another run's checkpoints, where `auto` would refuse to start.
        process: `this_process()` of the script, where a process that it forked or spawned for the fit makes this.

    Attributes:
        checkpoint: what this fit resumes from; None if it starts anew, or was given a path.

    Raises:
        ResumeError: `global_batch` is neither `keep` nor `change`.
    """

    def __init__(
        self,
        resume: str,
        global_batch: Literal["keep", "change"] = "keep",
        skip_other_runs: bool = False,
        process: str | None = None,
    ) -> None:
        self._resume = resume
        self._global_batch = global_batch
        self._skip_other_runs = skip_other_runs
        self._process = process or this_process()
        self.checkpoint: Path | None = None
        self.elastic = ElasticRestart(None, global_batch)

    def folder(self, trainer: Trainer, module: LightningModule, base: Path) -> Path:
        """Return the folder of this fit, the same on all ranks; a collective. Call it in a callback's `setup`.

        Raises:
            ResumeError: on all ranks, if the folder cannot be used.
        """
        fit, run_id = name_of_fit(trainer, module), this_run()
        in_place = self._resume == AUTO and run_id is not None
        own_only = self._skip_other_runs and self._resume == AUTO

        def take() -> Path:
            usable = (lambda folder: is_of_this_run(folder, run_id)) if own_only else (lambda folder: True)
            return folder_of_fit(base, fit, self._process, in_place, usable)

        if trainer.world_size == 1:
            return take()
        try:
            return GroupExchange(trainer.global_rank).on_rank_zero(take)
        except StepError as error:
            raise ResumeError(f"No checkpoint can be kept in {base}: {error}. Give another dirpath.") from error

    def setup(
        self, trainer: Trainer, module: LightningModule, folder: Path, reading: ReadContext = nullcontext
    ) -> None:
        """Prepare the fit to resume. Call it in a callback's `setup`, on all ranks.

        The context `reading` is entered while Lightning reads the checkpoint.

        Raises:
            ResumeError: the checkpoint that `resume` names cannot be resumed from, or its global batch cannot be kept;
                or another callback contradicts `resume`.
        """
        _require_no_contradiction(trainer)
        self.checkpoint, given = None, given_checkpoint(trainer)
        if given is not None:
            if trainer.is_global_zero:
                log.warning("fit goes on from %s, as it was told; resume=%s is not asked.", given, self._resume)
        else:
            self.checkpoint = choose_together(self._resume, folder, trainer.global_rank, trainer.world_size)
        self.elastic = ElasticRestart(self.checkpoint, self._global_batch)
        self.elastic.setup(trainer, module, "fit")
        if self.checkpoint is not None:
            restore_from(trainer, str(self.checkpoint), reading)
        # A previous attempt may have logged steps that this one repeats, even if it has written no checkpoint.
        job = read_job()
        restarted = self._resume in (AUTO, ANY) and job is not None and job.attempt > 0
        if given is None and (self.checkpoint is not None or restarted):
            for logger in trainer.loggers:
                if isinstance(logger, ContinuesRun):
                    logger.continue_run()


def searches_only(trainer: Trainer) -> bool:
    """Whether a fit is one of Lightning's Tuner, which searches for a setting and does not train."""
    return any(map(only_searches, finders(trainer)))


def finders(trainer: Trainer) -> list[LearningRateFinder | BatchSizeFinder]:
    """Lightning's callbacks that search for a setting before a fit trains."""
    return callbacks_of(trainer, LearningRateFinder, BatchSizeFinder)


def _require_no_contradiction(trainer: Trainer) -> None:
    if callbacks_of(trainer, ElasticRestart):
        raise ResumeError(
            "There are JobCheckpoint(resume=...), which keeps the global batch itself, and an ElasticRestart. Leave "
            "the latter out; JobCheckpoint(resume=..., global_batch='change') is its other setting."
        )
    for each in finders(trainer):
        raise ResumeError(
            f"A fit with the callback {type(each).__name__} cannot be resumed: it would search again, from the "
            "checkpoint's weights, and Lightning would then forget the rest of the checkpoint. Search before the fit, "
            "with lightning.pytorch.tuner.Tuner(trainer), or leave `resume` out."
        )
