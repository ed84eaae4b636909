"""JobCheckpoint: decides when to write a checkpoint, what it contains, and what a resume restores."""

from __future__ import annotations

import difflib
import logging
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from azureml_strategy.checkpoint import builtin_callbacks
from azureml_strategy.checkpoint.builtin_callbacks import warn_of_ranks_apart, warn_of_what_is_lost
from azureml_strategy.checkpoint.callback_state import SharedTimer, restore_states, states_of_ranks
from azureml_strategy.checkpoint.checkpoint_io import AtomicCheckpointIO, reads_through_io
from azureml_strategy.checkpoint.elastic import warn_unless_elastic
from azureml_strategy.checkpoint.exports import require_models, write_folder
from azureml_strategy.checkpoint.fit_resume import FitResume, default_folder, searches_only, warn_of_own_disk
from azureml_strategy.checkpoint.folder import CheckpointFolder, this_run
from azureml_strategy.checkpoint.global_batch import running_global_batch
from azureml_strategy.checkpoint.loop_progress import FitLoopState
from azureml_strategy.checkpoint.manifest import Manifest
from azureml_strategy.checkpoint.metric_state import (
    Settings,
    log_pending,
    metric_settings,
    metric_state,
    pending_metrics,
    restore_metric_state,
)
from azureml_strategy.checkpoint.module_record import module_entry, remember_input
from azureml_strategy.checkpoint.monitor import (
    FALLBACK,
    FALLBACK_MODE,
    is_absent,
    never_validates,
    say_unranked,
)
from azureml_strategy.checkpoint.random_state import find_generators, random_state, set_random_state
from azureml_strategy.checkpoint.writer import BackgroundWriter, CheckpointWriter, Written
from azureml_strategy.control.gather import gather_sound
from azureml_strategy.interfaces import ExpectsCheckpoints, PendingMetrics
from azureml_strategy.lightning_internals import checkpoint_io, restore_as_given, set_checkpoint_io, training_loaders

log = logging.getLogger(__name__)

# Key of our own entry in Lightning's checkpoint.
_OURS = "azureml_strategy"


class JobCheckpoint(ModelCheckpoint):
    """Writes checkpoints from which a killed run continues as if it had not been interrupted.

    It differs from Lightning's ModelCheckpoint as follows:

    - A checkpoint counts only when all its files are on disk and its manifest, with their sizes and checksums, is
      written.
    - It contains the random states of every rank and the pending metrics.
    - It is written once, even if it is both among the last and the best.
    - A full or failing disk causes a warning and does not end the run.
    - At the start of training, half-written files of previous attempts are removed.

    Training pauses only while its state is copied, see `HostCopyBuffer`. A background thread of each rank then writes
    the copy. Only one checkpoint is written at a time: the next one, and the end of training, wait for it.

    Checkpoints are written after each validation, or after each epoch if there is no validation, and also at intervals
    of steps and of time. The time interval restarts with each checkpoint. The last step is always written, unless an
    exception ends the training.

    If the first validation has ended and nobody logs the metric that `monitor` names, a checkpoint is written, and then
    an error stops the training: it can go on from there with another `monitor`. If no validation will run, a line says
    so before the first step, and at the end the newest checkpoint takes the place of the best one. It also does so if
    the training has ended by then.

    The manifests on disk decide which checkpoints stay, so the decision survives restarts. The newest checkpoint is
    never deleted. Newest means the latest start that wrote one, then the highest step; clocks do not matter.
    Checkpoints that the resume passed over, because they are damaged or were not wanted, are not deleted and take no
    place of a sound one. The same holds for checkpoints of another Azure ML run in the same folder.

    Args:
        dirpath: the folder; by default `checkpoints` below the job's output `run` (AZURE_ML_OUTPUT_run), or below the
            Trainer's `default_root_dir` if there is none.
        filename: as in ModelCheckpoint, without its extension.
        monitor: the metric that decides which checkpoints are the best, as the last validation has logged it; None to
            keep no best ones.
        mode: `min` or `max`, whichever is better for the metric.
        save_top_k: how many of the best stay; -1 for all.
        keep_last: how many of the newest stay, 1 or more. With two, one may be damaged.
        every_n_train_steps: optimizer steps between two checkpoints; None for no such interval.
        every_minutes: the longest time between two checkpoints; None for no such interval.
        every_n_epochs: write at the end of every n-th epoch, or after the validations in it.
        asynchronous: write on a background thread, which needs as much host memory as a rank writes. With False,
            training waits. It also waits under third-party strategies that write several files.
        read_again: in the middle of an epoch, read a loader that cannot restore its position again up to there, which
            takes time. With False, such a resume is refused.
        resume: makes `fit` resume by itself: `auto` from the newest whole checkpoint in the folder, `any` from the same
            whichever Azure ML run wrote it, `never`, or the path of a checkpoint. A path that `fit` is given wins.
            Loggers that can do so skip what was logged before. A further fit that would share the folder gets one
            beside it, with a number, and resumes from that. None leaves it all to `fit(ckpt_path=...)`.
        global_batch: with `resume`, what another number of ranks does: see `ElasticRestart`.
        hugging_face: at the end of training, write the folder `hugging_face` beside the checkpoints, which
            `from_pretrained` of transformers or peft opens. It is made of the best checkpoint, or of the newest if
            there is no `monitor` or nobody logs it, and replaces that of an earlier training.

    Attributes:
        monitor_is_default: whether a recipe of ours has chosen `monitor`. Nothing is stopped for one that nobody logs.

    Raises:
        ValueError: `keep_last` or an interval is out of range.
        MisconfigurationException: (in `fit`) nobody logs what `monitor` names.
        ResumeError: `global_batch` is neither `keep` nor `change`; or (in `fit`) what `resume` names cannot be resumed
            from.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        mode: str = "min",
        save_top_k: int = 1,
        keep_last: int = 2,
        every_n_train_steps: int | None = None,
        every_minutes: float | None = None,
        every_n_epochs: int = 1,
        asynchronous: bool = True,
        read_again: bool = True,
        resume: str | Path | None = None,
        global_batch: Literal["keep", "change"] = "keep",
        hugging_face: bool = False,
    ) -> None:
        super().__init__(dirpath, filename, monitor=monitor, mode=mode, save_top_k=save_top_k)
        _require("keep_last", keep_last, keep_last >= 1)
        _require("every_n_train_steps", every_n_train_steps, every_n_train_steps is None or every_n_train_steps >= 1)
        _require("every_minutes", every_minutes, every_minutes is None or every_minutes > 0)
        self.keep_last = keep_last
        self.asynchronous = asynchronous
        self.read_again = read_again
        self._every_n_epochs = every_n_epochs
        self._every_steps = every_n_train_steps
        self._timer = SharedTimer(60 * every_minutes) if every_minutes is not None else None
        self._due, self._measured = "", False  # why to write at the next step boundary; whether a validation has ended
        self._steps = 0
        self._monitor_known = False  # whether anybody logs it
        self.monitor_is_default = False
        self._pending_metrics: list[PendingMetrics] = []
        self._metric_settings: Settings = {}
        self._passed_over: frozenset[str] = frozenset()
        self._attempt = 1
        self._unvalidated = ""  # why no validation runs in this training
        self._background = BackgroundWriter()
        self._base = self.dirpath
        self._fit_resume = None if resume is None else FitResume(str(resume), global_batch)
        self._hugging_face = hugging_face

    @property
    def resumes(self) -> bool:
        """Whether `resume` was given, even if it is `never`."""
        return self._fit_resume is not None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._base = self._base or str(default_folder(trainer.default_root_dir))
        self.dirpath = self.dirpath or self._base
        trains = stage == "fit" and not trainer.fast_dev_run and not searches_only(trainer)  # type: ignore[attr-defined]
        resumes = self._fit_resume if trains else None
        if resumes is not None:
            self.dirpath = str(resumes.folder(trainer, pl_module, Path(self._base)))
        with warnings.catch_warnings():
            # A restarted job finds its own checkpoints there.
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
            super().setup(trainer, pl_module, stage)
        FitLoopState.of(trainer).forget()
        restore_as_given(trainer)  # a fit that failed early may have left it otherwise
        self._replace_checkpoint_io(trainer.strategy)
        if resumes is not None:
            resumes.setup(trainer, pl_module, Path(self.dirpath), lambda: self._read_context(trainer.strategy))
        if trainer.is_global_zero and stage == "fit":
            warn_of_own_disk(Path(self.dirpath))
            self._remove_leftovers()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit_resume is not None:
            self._fit_resume.elastic.on_fit_start(trainer, pl_module)
        self._metric_settings = metric_settings(trainer)
        if self._hugging_face:
            require_models(trainer.strategy)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.asynchronous:
            self._background.connect(trainer)
        if self._timer is not None:
            self._timer.restart()
        self._steps = self._last_global_step_saved = trainer.global_step  # an earlier fit may have saved at this step
        self._last_checkpoint_saved, self._monitor_known = "", False
        self._unvalidated = never_validates(trainer)
        if self.monitor and not trainer.fast_dev_run and self._unvalidated:  # type: ignore[attr-defined]
            _warn(trainer, say_unranked(self.monitor, self._unvalidated))
        warn_of_what_is_lost(trainer)
        log_pending(trainer, self._pending_metrics)
        self._pending_metrics = []

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        remember_input(pl_module, batch)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Without validation, an epoch is measured at its end. Only then it may turn out that the loaders are empty.
        if self._unvalidated or (trainer.num_val_batches and not any(trainer.num_val_batches)):
            self._note_measurement(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._note_measurement(trainer)

    def on_step_boundary(self, trainer: Trainer) -> None:
        """Save a checkpoint if one is due: between two steps, after every hook of the last one."""
        before, self._steps = self._steps, trainer.global_step
        every = self._every_steps
        passed = every is not None and self._steps // every > before // every  # a batch may take several steps
        timed = self._timer is not None and self._timer.due(trainer.strategy.broadcast)
        if passed or timed:
            self._due = self._due or "interval"
        if FitLoopState.of(trainer).ends:
            self._due = self._due or "end"
        if self._due and not self._should_skip_saving_checkpoint(trainer):
            unknown = self._look_for_monitor(trainer)
            self._save(trainer, self._due)
            if unknown:
                self._finish(trainer)
                saved = f"The training up to here is in {self._last_checkpoint_saved}."
                lost = "No checkpoint could be written."
                raise MisconfigurationException(f"{unknown} {saved if self._last_checkpoint_saved else lost}")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            self._save(trainer, "end")  # no step boundary has come since the last step
        self._finish(trainer)
        if self.monitor and not self.best_k_models and self.last_model_path:
            _warn(
                trainer,
                f"No checkpoint has a {self.monitor!r}, so that none is the best of this training. The newest takes "
                f"its place: {self.last_model_path}",
            )
            self.best_model_path = self.last_model_path
        if self._hugging_face and self.best_model_path:
            _announce_writing(trainer)
            write_folder(trainer, Path(self.best_model_path), self._background)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write no new checkpoint: it needs all ranks, and other ranks may not have had the exception."""
        restore_as_given(trainer)
        self._adopt(trainer, self._background.close())

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._adopt(trainer, self._background.close())

    def save_now(self, trainer: Trainer, reason: str) -> str | None:
        """Write a checkpoint, if this step has none; a collective.

        Call it on all ranks between the same two steps, as in `on_step_boundary`.

        Args:
            trainer: in training.
            reason: why it is written, for the manifest and the log.

        Returns:
            The path of this step's checkpoint, complete on disk; None if it could not be written.
        """
        self._finish(trainer)
        if self._last_global_step_saved != trainer.global_step or not self._last_checkpoint_saved:
            self._save(trainer, reason)
            self._finish(trainer)
        return self._last_checkpoint_saved or None

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint |= module_entry(pl_module)  # also under a strategy that adds nothing
        loop = FitLoopState.of(trainer)
        own = {
            "random": random_state(_generators(trainer)),
            "data": loop.data.state_dict(),
            "metrics": metric_state(trainer, self._metric_settings),
        }
        checkpoint[_OURS] = {
            "between_steps": loop.between_steps,
            "ranks": gather_sound(own),
            "states": states_of_ranks(trainer, checkpoint),
            "callbacks": builtin_callbacks.save(trainer, checkpoint),
            "unwritten": pending_metrics(trainer),
        }

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if self._fit_resume is not None:
            self._fit_resume.elastic.on_load_checkpoint(trainer, pl_module, checkpoint)
        self._last_global_step_saved = checkpoint["global_step"]
        self._passed_over = self._folder.newer_than(Path(str(trainer.ckpt_path)))
        ours = checkpoint.get(_OURS)
        if ours is None or not ours["between_steps"]:
            rank_zero_warn(
                f"{trainer.ckpt_path} was not written by JobCheckpoint, between two steps. Lightning goes on from it "
                "in its own way: what came later in that step, random numbers and the place in the data may be lost."
            )
            return
        self._pending_metrics = ours["unwritten"]
        own = ours["ranks"][trainer.global_rank] if len(ours["ranks"]) == trainer.world_size else None
        if own is None:
            rank_zero_info(
                f"The checkpoint has the random numbers of {len(ours['ranks'])} ranks, and there are "
                f"{trainer.world_size} now: each draws new ones."
            )
            if self._fit_resume is None or self._fit_resume.checkpoint is None:
                warn_unless_elastic(trainer)
        states = ours.get("states")  # an older version's checkpoint has none
        if own is not None and states:
            restore_states(trainer, checkpoint, states[trainer.global_rank])
        builtin_callbacks.stop_again(trainer, ours["callbacks"])

        def restore(within_epoch: bool) -> None:
            builtin_callbacks.restore(trainer, ours["callbacks"], within_epoch)
            if own is not None:
                restore_metric_state(trainer, own["metrics"])
                set_random_state(own["random"], _generators(trainer))

        FitLoopState.of(trainer).resume(own["data"] if own is not None else None, restore, self.read_again)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}  # the manifests say which checkpoints stay

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def _replace_checkpoint_io(self, strategy: Strategy) -> None:
        """Give the strategy an AtomicCheckpointIO, unless the user gave it a CheckpointIO."""
        if type(checkpoint_io(strategy)) in (type(None), TorchCheckpointIO):
            set_checkpoint_io(strategy, AtomicCheckpointIO(reads_through_io(strategy), strategy))

    def _read_context(self, strategy: Strategy) -> AbstractContextManager[None]:
        """A context that is entered while Lightning reads the checkpoint that this callback has chosen."""
        return nullcontext()

    def _note_measurement(self, trainer: Trainer) -> None:
        """Note that a validation has ended, or an epoch without validation."""
        self._measured = True
        if self._every_n_epochs >= 1 and (trainer.current_epoch + 1) % self._every_n_epochs == 0:
            self._due = "epoch"

    def _save(self, trainer: Trainer, reason: str) -> None:
        """Write and commit a checkpoint and delete old ones, or start to. A failure becomes a warning on all ranks."""
        self._finish(trainer)
        warn_of_ranks_apart(trainer)
        self._last_global_step_saved, self._last_checkpoint_saved = trainer.global_step, ""
        writer = CheckpointWriter(self._folder, self.keep_last, self.save_top_k, self._passed_over)
        self._background.save(trainer, self._new_manifest(trainer, reason), writer)
        self._due, self._measured = "", False
        if self._timer is not None:
            self._timer.restart()
        if not self._background.under_way:
            self._finish(trainer)

    def _look_for_monitor(self, trainer: Trainer) -> str:
        """Check once that a validation has logged the metric. Return why the training has to stop, or "".

        Rank 0's metrics count: a value may be logged on rank 0 alone.
        """
        if not self.monitor or not self._measured or self._monitor_known:
            return ""
        mine = is_absent(trainer, self.monitor), list(trainer.callback_metrics)
        absent, logged = trainer.strategy.broadcast(mine)
        self._monitor_known = absent or self.monitor in logged
        if not absent or self._unvalidated:  # that no validation runs was logged before the first step
            return ""
        if self.monitor_is_default:
            found = FALLBACK in logged
            instead = "the newest checkpoints stay, and none is kept as the best"
            if found:
                instead = f"the best checkpoint is that of the lowest {FALLBACK}"
            _warn(
                trainer,
                f"Nobody logs {self.monitor!r}, by which this recipe ranks its checkpoints: {instead}. "
                "`checkpoint.monitor=NAME` names another.",
            )
            if found:
                self.monitor, self.mode = FALLBACK, FALLBACK_MODE
            return ""
        near = difflib.get_close_matches(self.monitor, logged, n=3) or sorted(logged)
        there = f"Logged are: {', '.join(near)}." if near else "Nothing is logged."
        words = (
            f"JobCheckpoint(monitor={self.monitor!r}), but nobody has logged that. {there} Give one of these names (in "
            f"a recipe, `checkpoint.monitor=NAME`), call self.log({self.monitor!r}, value) in the module, or leave "
            "`monitor` out."
        )
        if not FitLoopState.of(trainer).ends:
            return words
        _warn(trainer, words)
        return ""

    def _finish(self, trainer: Trainer) -> None:
        """Wait for the checkpoint that is being written, if any. Call it on all ranks."""
        if self._background.under_way:
            _announce_writing(trainer)
        self._adopt(trainer, self._background.finish())

    def _new_manifest(self, trainer: Trainer, reason: str) -> Manifest:
        """The manifest without its files. Rank 0's is written."""
        # The score is the metric of the last validation, if that came after the previous checkpoint.
        score = trainer.callback_metrics.get(self.monitor) if self.monitor and self._measured else None
        return Manifest(
            name=Path(self.format_checkpoint_name(self._monitor_candidates(trainer))).name,
            step=trainer.global_step,
            epoch=trainer.current_epoch,
            saved_at=time.time(),
            world_size=trainer.world_size,
            reason=reason,
            score=None if score is None else float(score),
            mode=self.mode,
            files={},
            global_batch=running_global_batch(trainer),
            attempt=self._attempt,
            run_id=self._folder.run_id,
        )

    @property
    def _folder(self) -> CheckpointFolder:
        return CheckpointFolder(Path(str(self.dirpath)), this_run())

    def _remove_leftovers(self) -> None:
        try:
            self._attempt = self._folder.next_attempt()
            left = self._folder.remove_leftovers()
        except OSError as error:
            rank_zero_warn(f"What an earlier attempt left half-written in {self.dirpath} cannot be removed: {error}")
            return
        if left:
            rank_zero_info(f"Removed what an earlier attempt left half-written: {', '.join(left)}")

    def _adopt(self, trainer: Trainer, written: Written | None) -> None:
        """Set what Lightning and its loggers read from a ModelCheckpoint, equal on all ranks."""
        if written is None:
            return
        self._last_checkpoint_saved = self.last_model_path = str(self._folder.path / written.manifest.name)
        self.best_k_models = {path: torch.tensor(score) for path, score in written.scores.items()}
        self.best_model_path = next(iter(self.best_k_models), self.last_model_path if self.monitor is None else "")
        self.best_model_score = self.best_k_models.get(self.best_model_path)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)


def _announce_writing(trainer: Trainer) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ExpectsCheckpoints):
            callback.writes_checkpoint()


def _warn(trainer: Trainer, words: str) -> None:
    """Warn by our own logger: a recipe's console hides Lightning's lines, and Python repeats no warning."""
    if trainer.is_global_zero:
        log.warning("%s", words)


def _generators(trainer: Trainer) -> dict[str, Any]:
    """Find the random generators that parts of the training own."""
    loaders = training_loaders(trainer)
    return find_generators(
        {
            "loaders": loaders.flattened if loaders is not None else [],
            "module": trainer.lightning_module,
            "data module": trainer.datamodule,  # type: ignore[attr-defined]
            "callbacks": trainer.callbacks,  # type: ignore[attr-defined]
        }
    )


def _require(name: str, value: float | None, valid: bool) -> None:
    if not valid:
        raise ValueError(f"{name}={value} is out of range: it must be above 0, or left out.")
