"""The checkpoints of a run that may end at any moment."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from azureml_strategy.checkpoint.batch_of_trainer import running_global_batch
from azureml_strategy.checkpoint.boundary import accumulating, at_step_boundary
from azureml_strategy.checkpoint.elastic import warn_unless_elastic
from azureml_strategy.checkpoint.manifest import Manifest
from azureml_strategy.checkpoint.pausing import waits_for_checkpoint
from azureml_strategy.checkpoint.random_state import RandomState, gather, random_state, set_random_state
from azureml_strategy.checkpoint.saving import Saving
from azureml_strategy.checkpoint.storage_folder import CheckpointFolder
from azureml_strategy.checkpoint.storage_io import AtomicCheckpointIO, reads_through_io
from azureml_strategy.checkpoint.storage_write import CheckpointWriter, Written
from azureml_strategy.checkpoint.timer import SharedTimer
from azureml_strategy.checkpoint.unwritten import Unwritten, log_again, unwritten

# Our own entry among those of Lightning's checkpoint.
_OURS = "azureml_strategy"


class JobCheckpoint(ModelCheckpoint):
    """Checkpoints from which a killed run goes on as if nothing had happened.

    Differences to Lightning's ModelCheckpoint: a checkpoint counts only when all its files are on disk and its
    manifest, with their sizes and checksums, is written; it holds the random numbers of every rank and what was about
    to be logged; it is written once, whether it is among the last or the best; a disk that is full or fails costs a
    warning, not the run. What dead attempts left half-written is removed at the start of training.

    Training stands still only while its state is copied, or not even that long; see `SnapshotBuffers`. A thread of
    each rank writes, one checkpoint at a time: the next one waits for the last, and so does the end of training.

    It is written after each validation, or each epoch where there is none, and besides that by step and by time. The
    interval in time begins anew with each checkpoint. Which ones stay is decided by the manifests on disk, so that
    it survives restarts; the newest is never deleted. Those that were passed over when the run was resumed, damaged or
    not wanted, count for nothing: they take no sound one's place, and are not deleted.

    Args:
        dirpath: the folder; else `checkpoints` below the Trainer's `default_root_dir`.
        filename: as in ModelCheckpoint, without its extension.
        monitor: the metric that says which are the best; None for no best.
        mode: whether a `min` or a `max` of it is better.
        save_top_k: how many of the best stay; -1 for all.
        keep_last: how many of the newest stay, 1 or more; two, so that one can be damaged.
        every_n_train_steps: optimizer steps between two; None for no such interval.
        every_minutes: the longest time between two; None for no such interval.
        every_n_epochs: which epochs' ends count.
        asynchronous: write behind the training, which takes as much of the host's memory as a rank writes. False has
            training wait; and so it does under strategies of others that write several files.

    Raises:
        ValueError: `keep_last` or an interval is out of range.
    """

    def __init__(
        self,
        dirpath: _PATH | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        mode: str = "min",
        save_top_k: int = 1,
        keep_last: int = 2,
        every_n_train_steps: int | None = None,
        every_minutes: float | None = None,
        every_n_epochs: int = 1,
        asynchronous: bool = True,
    ) -> None:
        super().__init__(dirpath, filename, monitor=monitor, mode=mode, save_top_k=save_top_k)
        _require("keep_last", keep_last, keep_last >= 1)
        _require("every_n_train_steps", every_n_train_steps, every_n_train_steps is None or every_n_train_steps >= 1)
        _require("every_minutes", every_minutes, every_minutes is None or every_minutes > 0)
        self.keep_last = keep_last
        self.asynchronous = asynchronous
        self._every_n_epochs = every_n_epochs
        self._every_steps = every_n_train_steps
        self._timer = SharedTimer(60 * every_minutes) if every_minutes is not None else None
        self._due = False
        self._pending: dict[str, Any] = {}
        self._unwritten: list[Unwritten] = []
        self._restored: RandomState | None = None
        self._passed_over: frozenset[str] = frozenset()
        self._saving = Saving()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.dirpath is None:
            self.dirpath = str(Path(trainer.default_root_dir, "checkpoints"))
        with warnings.catch_warnings():
            # a restarted job finds its own checkpoints there
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
            super().setup(trainer, pl_module, stage)
        strategy = trainer.strategy
        if type(strategy._checkpoint_io) in (type(None), TorchCheckpointIO):
            strategy._checkpoint_io = AtomicCheckpointIO(plain=reads_through_io(strategy))
        if trainer.is_global_zero and stage == "fit":
            self._clean_up()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _place_loaders(trainer)
        if self.asynchronous:
            self._saving.connect(trainer)
        if self._timer is not None:
            self._timer.restart()
        log_again(trainer, self._unwritten)
        self._unwritten = []
        if self._pending:
            for logger in trainer.loggers:
                logger.log_metrics(**self._pending)
            self._pending = {}
        if self._restored is not None:
            set_random_state(self._restored)
            self._restored = None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._saving.settle()  # a step that was skipped had no backward pass
        stepped = not accumulating(trainer)
        self._due |= stepped and self._every_steps is not None and trainer.global_step % self._every_steps == 0
        self._due |= self._timer is not None and self._timer.due(trainer.strategy.broadcast)
        if self._due and at_step_boundary(trainer) and not self._should_skip_saving_checkpoint(trainer):
            self._save(trainer, "interval", measured=False)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        validated = self._should_save_on_train_epoch_end(trainer)
        if validated or self._due:
            self._save_after_epoch(trainer, validated)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._should_save_on_train_epoch_end(trainer):
            self._save_after_epoch(trainer, validated=True)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saving.settle()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._saving.settle()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)  # Lightning would add a checkpoint that is there already

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """No new one: other ranks may not have met it, and a checkpoint needs all of them."""
        self._adopt(trainer, self._saving.close())

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._adopt(trainer, self._saving.close())

    def save_now(self, trainer: Trainer, reason: str) -> str | None:
        """Write a checkpoint, if this step has none; a collective.

        Args:
            trainer: on all ranks at the end of the same batch, one that is `at_step_boundary`.
            reason: why, for the manifest and the log.

        Returns:
            The path of this step's checkpoint, complete on disk; None where it could not be written.
        """
        self._finish(trainer)
        if self._last_global_step_saved != trainer.global_step or not self._last_checkpoint_saved:
            self._save(trainer, reason, measured=False, last=True)
            self._finish(trainer)
        return self._last_checkpoint_saved or None

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[_OURS] = {
            "random": gather(random_state()),
            "pending": _about_to_be_logged(trainer),
            "unwritten": unwritten(trainer),
        }

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._last_global_step_saved = checkpoint["global_step"]
        self._passed_over = self._folder.newer_than(Path(str(trainer.ckpt_path)))
        ours = checkpoint.get(_OURS)
        if ours is None:
            return
        self._pending, self._unwritten = ours["pending"], ours.get("unwritten", [])
        if len(ours["random"]) == trainer.world_size:
            self._restored = ours["random"][trainer.global_rank]
        else:
            rank_zero_info(
                f"The checkpoint has the random numbers of {len(ours['random'])} ranks, and there are "
                f"{trainer.world_size} now: each draws new ones."
            )
            warn_unless_elastic(trainer)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}  # which ones are kept is read from the manifests

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def _save_after_epoch(self, trainer: Trainer, validated: bool) -> None:
        if self._should_skip_saving_checkpoint(trainer):
            return
        self._due |= self._every_n_epochs >= 1 and (trainer.current_epoch + 1) % self._every_n_epochs == 0
        if self._due and not accumulating(trainer):  # else at the end of the step that is under way
            self._save(trainer, "epoch", measured=validated)

    def _save(self, trainer: Trainer, reason: str, measured: bool, last: bool = False) -> None:
        """Write, commit and clear away, or begin to; every failure ends as a warning, on all ranks alike."""
        self._finish(trainer)
        self._last_global_step_saved, self._last_checkpoint_saved = trainer.global_step, ""
        writer = CheckpointWriter(self._folder, self.keep_last, self.save_top_k, self._passed_over)
        self._saving.save(trainer, self._draft(trainer, reason, measured), writer, last)
        self._due = False
        if self._timer is not None:
            self._timer.restart()
        if not self._saving.under_way:
            self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        """Wait for the checkpoint that is being written, if there is one; on all ranks."""
        if self._saving.under_way:
            waits_for_checkpoint(trainer)
        self._adopt(trainer, self._saving.finish())

    def _draft(self, trainer: Trainer, reason: str, measured: bool) -> Manifest:
        return Manifest(
            name=self._wanted_name(trainer),
            step=trainer.global_step,
            epoch=trainer.current_epoch,
            saved_at=time.time(),
            world_size=trainer.world_size,
            reason=reason,
            score=self._score(trainer, measured),
            mode=self.mode,
            files={},
            global_batch=running_global_batch(trainer),
        )

    @property
    def _folder(self) -> CheckpointFolder:
        return CheckpointFolder(Path(str(self.dirpath)))

    def _wanted_name(self, trainer: Trainer) -> str:
        return Path(self.format_checkpoint_name(self._monitor_candidates(trainer))).name

    def _score(self, trainer: Trainer, measured: bool) -> float | None:
        value = trainer.callback_metrics.get(self.monitor) if self.monitor and measured else None
        return None if value is None else float(value)

    def _clean_up(self) -> None:
        try:
            left = self._folder.remove_leftovers()
        except OSError as error:
            rank_zero_warn(f"What an earlier attempt left half-written in {self.dirpath} cannot be removed: {error}")
            return
        if left:
            rank_zero_info(f"Removed what an earlier attempt left half-written: {', '.join(left)}")

    def _adopt(self, trainer: Trainer, written: Written | None) -> None:
        """What Lightning and its loggers ask of a ModelCheckpoint, equal on all ranks."""
        if written is None:
            return
        self._last_checkpoint_saved = self.last_model_path = str(self._folder.path / written.manifest.name)
        self.best_k_models = {path: torch.tensor(score) for path, score in written.scores.items()}
        self.best_model_path = next(iter(self.best_k_models), self.last_model_path if self.monitor is None else "")
        self.best_model_score = self.best_k_models.get(self.best_model_path)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)


def _place_loaders(trainer: Trainer) -> None:
    """Have the loaders go on where they were, where Lightning forgot it.

    A module that asks for `trainer.estimated_stepping_batches` has the loaders made before the checkpoint's loops are
    restored, and Lightning tells only loaders that it makes afterwards.
    """
    loop = trainer.fit_loop
    if loop._combined_loader_states_to_load and loop._data_fetcher is not None:
        loop._load_combined_loader_states()
        iter(loop._data_fetcher)


def _about_to_be_logged(trainer: Trainer) -> dict[str, Any]:
    """The metrics of the batch that just ended: Lightning logs them after its callbacks, a resumed run never."""
    connector = trainer._logger_connector
    of_batch = connector._first_loop_iter is not None
    # Lightning's count of accumulated batches, by which it logs; DeepSpeed's is another one
    logs = connector.should_update_logs and not trainer.fit_loop._should_accumulate()
    if not trainer.training or (of_batch and not logs):
        return {}
    metrics = {name: float(value) for name, value in connector.metrics["log"].items()}
    # as Lightning counts: what belongs to an epoch gets the number of its last step
    step = trainer.fit_loop.epoch_loop._batches_that_stepped - (0 if of_batch else 1)
    return {"metrics": {"epoch": trainer.current_epoch, **metrics}, "step": step} if metrics else {}


def _require(name: str, value: float | None, valid: bool) -> None:
    if not valid:
        raise ValueError(f"{name}={value} is out of range: it must be above 0, or left out.")
