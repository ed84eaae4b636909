"""Resume on another number of nodes, with the same global batch and at the same place in the data."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from azureml_strategy.checkpoint.builtin_callbacks import callbacks_of
from azureml_strategy.checkpoint.global_batch import GlobalBatch, configured_global_batch
from azureml_strategy.checkpoint.manifest import Manifest, manifest_path
from azureml_strategy.checkpoint.resume import ResumeError
from azureml_strategy.interfaces import CutsBatches

_SHOWN = 6
log = logging.getLogger(__name__)
# New values for arguments of the Trainer, by name: numbers of batches, or fractions of an epoch.
Batches = dict[str, int | float]


def rescale(fit_loop: dict[str, Any], ratio: Fraction, epoch_batches: int | None) -> None:
    """Convert the batch counters of a checkpoint's fit loop to batches of another size.

    Lightning counts the batches of one replica, in the epoch and in total. Steps, epochs and schedulers have counters
    of their own, which stay as they are. The state of the fit loop is changed in place.

    Args:
        fit_loop: its state in the checkpoint.
        ratio: number of new batches for one old batch.
        epoch_batches: number of new batches in an epoch; None if it is not known.
    """
    progress = fit_loop["epoch_loop.batch_progress"]
    _shift(progress["total"], math.ceil(progress["total"]["ready"] * ratio))
    ready = math.ceil(progress["current"]["ready"] * ratio)
    if epoch_batches is None or ready < epoch_batches:
        _shift(progress["current"], ready)
        return
    _shift(progress["current"], epoch_batches)
    progress["is_last_batch"] = True  # less than a step is left of the epoch, so it ends


def counts_batches_itself(fit_loop: dict[str, Any]) -> bool:
    """Whether a data loader keeps a state that is not a `ResumableLoader`'s, which counts samples over all replicas."""
    states: list[Any] = fit_loop["state_dict"].get("combined_loader", [])
    return any(not isinstance(each, dict) or each.keys() - {"order"} != {"epoch", "samples"} for each in states)


def _shift(count: dict[str, int], ready: int) -> None:
    """Shift all counters by the same. Lightning infers from their differences where a checkpoint was written."""
    moved = ready - count["ready"]
    for name in count:
        count[name] += moved


@dataclass(frozen=True)
class ElasticPlan:
    """A checkpoint's global batch, and the ranks that resume with it.

    Attributes:
        checkpoint: the path, for messages.
        saved: the global batch of the checkpoint.
        asked: the global batch that the Trainer and its data are configured for.
        ranks_per_replica: processes that read the same samples.
        ranks_per_node: processes on each node.
    """

    checkpoint: Path
    saved: GlobalBatch
    asked: GlobalBatch
    ranks_per_replica: int
    ranks_per_node: int

    def accumulated(self) -> GlobalBatch:
        """Choose the accumulation that gives a step as many samples as the saved one.

        Raises:
            ResumeError: no whole number of batches gives that many samples.
        """
        accumulation, rest = divmod(self.saved.size, self.asked.round_size)
        if rest:
            raise self.refused(
                f"these ranks read {self.asked.round_size} at once, and no whole number of that makes {self.saved.size}"
            )
        return replace(self.asked, accumulation=accumulation)

    def cut(self, micro_batches: int) -> tuple[GlobalBatch, int]:
        """Choose the batch size that keeps the saved global batch, with micro-batches of the configured size.

        A batch is configured to be cut into `micro_batches`. Return the global batch, and the number of micro-batches
        in one of its batches.

        Raises:
            ResumeError: no whole number of micro-batches gives as many samples as the saved global batch, or the
                batch size is not known.
        """
        if self.asked.batch_size is None:
            raise self.refused("the data loader does not say how large its batches are, which a pipeline cuts")
        piece = max(1, self.asked.batch_size // micro_batches)
        number, rest = divmod(self.saved.size, piece * self.asked.replicas)
        if rest:
            once = f"these ranks read {piece * self.asked.replicas} with a micro-batch each"
            raise self.refused(f"{once}, and no whole number of that makes {self.saved.size}", piece)
        return replace(self.asked, batch_size=number * piece), number

    def epoch_batches(self, ratio: Fraction) -> int:
        """The number of batches in an epoch now, at `ratio` new ones for an old one.

        It is rounded down, so that they hold no more samples than the epoch had.

        Raises:
            ResumeError: the epoch has too few samples for one batch on each replica.
        """
        before = self.saved.epoch_batches or 0
        if before * ratio < 1:
            raise self.refused(f"an epoch, which had {before} batch(es), has too few samples for one on each rank")
        return math.floor(before * ratio)

    def refused(self, why: str, piece: int | None = None) -> ResumeError:
        """The error that gives the reason in numbers and lists every way out.

        A `piece` is the number of samples of a micro-batch, if batches are cut into micro-batches.
        """
        size = f"{self.saved.size} {'batches' if self.asked.batch_size is None else 'samples'}"
        return ResumeError(
            f"{self.checkpoint} was written with {size} to an optimizer step: {self.saved}. Now there is {self.asked}, "
            f"and {why}. {self._ways(piece)} To go on with another global batch, write `global_batch=change`, or "
            "ElasticRestart(..., global_batch='change') in a script; `resume=never` starts anew."
        )

    def _ways(self, piece: int | None) -> str:
        """The other numbers of ranks, and the other batch size, that keep the global batch."""
        ways = []
        units, rest = divmod(self.saved.size, piece or self.asked.batch_size or 1)
        replicas = [each for each in _divisors(units) if each != self.asked.replicas] if not rest else []
        ranks = [each * self.ranks_per_replica for each in replicas]
        nodes = [each // self.ranks_per_node for each in ranks if each % self.ranks_per_node == 0]
        on_nodes = f", on {_listed(nodes)} node(s) of {self.ranks_per_node} process(es)" if nodes else ""
        if replicas:
            ways.append(f"with {_listed(replicas)} data-parallel rank(s){on_nodes}")
        share, rest = divmod(self.saved.size, self.asked.replicas)
        if self.asked.batch_size is not None and not rest and piece is None:
            # The largest batch size, up to the configured one, with which these ranks reach the saved global batch.
            batch_size = max(each for each in _divisors(share) if each <= self.asked.batch_size)
            ways.append(f"with a batch size of {batch_size} (data.batch_size={batch_size} in a recipe)")
        return f"Come back {', or '.join(ways)}." if ways else "No number of ranks fits these batches."


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _listed(numbers: Sequence[int]) -> str:
    """List the largest numbers only: users seldom want fewer ranks."""
    *most, last = [str(each) for each in numbers[-_SHOWN:]]
    return f"{', '.join(most)} or {last}" if most else last


class ElasticRestart(Callback):
    """Resume from a checkpoint with another number of data-parallel ranks.

    The manifest of a `JobCheckpoint` records how many samples an optimizer step has. The callback sets the Trainer's
    accumulation so that this number stays the same, before anything is built that depends on it. Settings of the
    Trainer that count batches refer to the accumulation that it was given, so they are scaled with the accumulation.
    The place in the epoch is scaled too. Steps, learning rates and the order of samples are then those of a run that
    was never interrupted. If no accumulation keeps the number of samples, training does not start.

    If the strategy cuts batches into `micro_batches`, the callback changes the number of micro-batches instead, and
    with it the `batch_size` of the data module.

    Args:
        checkpoint: the path that is given to `Trainer.fit(ckpt_path=...)`; None for a run that starts anew.
        global_batch: `keep` does the above. `change` resumes with the configured batch size, ranks and accumulation,
            and keeps only the place in the epoch.

    Raises:
        ResumeError: `global_batch` is neither `keep` nor `change`.
    """

    def __init__(self, checkpoint: str | Path | None, global_batch: Literal["keep", "change"] = "keep") -> None:
        if global_batch not in ("keep", "change"):
            raise ResumeError(f"global_batch={global_batch!r}, but it is `keep` or `change`.")
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._keep = global_batch == "keep"
        self._ratio = self._stretch = Fraction(1)
        self._epoch_batches: int | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Change the Trainer's settings before it reads them.

        Raises:
            ResumeError: the global batch cannot be kept. All ranks raise it.
        """
        if stage != "fit" or self._checkpoint is None:
            return
        if len(callbacks_of(trainer, ElasticRestart)) > 1:
            raise ResumeError("There are two ElasticRestart callbacks. Leave yours out: a recipe has one of its own.")
        found: tuple[GlobalBatch | None, str] = (None, "")
        if trainer.is_global_zero:
            found = _saved_global_batch(self._checkpoint)
        saved, error = trainer.strategy.broadcast(found)
        if error:
            raise ResumeError(error)
        if saved is None:
            _warn(trainer, f"{self._checkpoint} does not say its global batch: nothing is done to keep it.")
            return
        asked = configured_global_batch(trainer)
        saved, asked = saved.as_known_by(asked), asked.as_known_by(saved)
        if callbacks_of(trainer, GradientAccumulationScheduler) and saved.round_size == asked.round_size:
            return  # the scheduler sets the accumulation of each epoch, as it did before
        ranks, nodes = trainer.world_size, max(1, trainer.num_nodes)
        plan = ElasticPlan(self._checkpoint, saved, asked, max(1, ranks // asked.replicas), max(1, ranks // nodes))
        now = self._keep_global_batch(trainer, plan) if self._keep else asked
        self._ratio = now.batches_for_one_of(saved)
        self._stretch = Fraction(now.accumulation, asked.accumulation)
        changes = self._scaled_intervals(trainer, plan) if self._keep else {}
        for name, value in changes.items():
            setattr(trainer, name, value)
        self._explain(trainer, saved, asked, now, changes)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step" and config.frequency > 1:  # 1 means every optimizer step, at any accumulation
                # Lightning steps a scheduler at batches that are multiples of its frequency. The whole multiples of
                # p/q are the multiples of p.
                config.frequency = (config.frequency * self._stretch).numerator

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._ratio == 1:
            return
        assert self._checkpoint is not None
        if Path(str(trainer.ckpt_path)).absolute() != self._checkpoint.absolute():
            raise ResumeError(
                f"ElasticRestart was given {self._checkpoint}, but fit(ckpt_path=...) goes on from "
                f"{trainer.ckpt_path}. Give both the same."
            )
        fit_loop = checkpoint["loops"]["fit_loop"]
        rescale(fit_loop, self._ratio, self._epoch_batches)
        if counts_batches_itself(fit_loop):
            _warn(
                trainer,
                "The data loader keeps its own place in the epoch, which need not fit other batches: some samples of "
                "this epoch may come twice or not at all. azureml_strategy.data.ResumableLoader counts samples.",
            )

    def _keep_global_batch(self, trainer: Trainer, plan: ElasticPlan) -> GlobalBatch:
        """Configure the Trainer or the strategy so that a step has as many samples as before."""
        if plan.asked.size == plan.saved.size:
            return plan.asked
        if isinstance(trainer.strategy, CutsBatches):
            return _change_micro_batches(trainer, trainer.strategy, plan)
        now = plan.accumulated()
        if callbacks_of(trainer, GradientAccumulationScheduler):
            raise plan.refused("a GradientAccumulationScheduler says how many batches they accumulate")
        if not trainer.lightning_module.automatic_optimization:
            raise plan.refused("the module optimizes manually, so that it accumulates by itself")
        trainer.accumulate_grad_batches = now.accumulation
        config = getattr(trainer.strategy, "config", None)
        if isinstance(config, dict):
            config.pop("gradient_accumulation_steps", None)  # DeepSpeed's copy of the Trainer's old value
        return now

    def _scaled_intervals(self, trainer: Trainer, plan: ElasticPlan) -> Batches:
        """Convert the Trainer's batch counts to batches of this run; an epoch gets no more samples than before."""
        changes: Batches = {}
        if self._ratio == self._stretch == 1:
            return changes
        if plan.saved.epoch_batches is not None:
            self._epoch_batches = changes["limit_train_batches"] = plan.epoch_batches(self._ratio)
        for name in ("val_check_interval", "limit_val_batches"):
            given = getattr(trainer, name)
            if isinstance(given, float) and name == "val_check_interval" and given < 1 and self._epoch_batches:
                given = max(1, int(self._epoch_batches / self._stretch * given))
            if isinstance(given, int) and given and self._stretch != 1:
                changes[name] = math.ceil(given * self._stretch)
        once = trainer.check_val_every_n_epoch is not None and self._epoch_batches is not None
        if once and changes.get("val_check_interval", 0) >= (self._epoch_batches or 0):
            changes["val_check_interval"] = 1.0  # the end of the epoch, which may have become a batch shorter
        return changes

    def _explain(
        self, trainer: Trainer, saved: GlobalBatch, asked: GlobalBatch, now: GlobalBatch, changes: Batches
    ) -> None:
        if now.size != saved.size:
            _warn(trainer, f"The global batch changes from {saved.size} ({saved}) to {now.size} ({now}).")
        elif now != asked or self._ratio != 1:
            counted = ", ".join(f"{name}={value}" for name, value in changes.items())
            _warn(
                trainer,
                f"The global batch stays {saved.size}: it was {saved}, and is {now}."
                + (f" Counted in these batches, {counted}." if counted else ""),
            )
        steps = replace(now, epoch_batches=self._epoch_batches).epoch_steps
        if steps is not None and steps != saved.epoch_steps:
            _warn(
                trainer,
                f"An epoch has {steps} steps instead of {saved.epoch_steps}: what was its last one is too small for a "
                f"batch on each of {now.replicas} data-parallel ranks.",
            )


def warn_unless_elastic(trainer: Trainer) -> None:
    """Warn a script that resumes with another number of ranks if it has no `ElasticRestart`."""
    if not callbacks_of(trainer, ElasticRestart):
        rank_zero_warn(
            "The checkpoint is of another number of ranks, and nothing keeps its global batch and the place in its "
            "epoch. Add the callback azureml_strategy.checkpoint.ElasticRestart(checkpoint), with what you give to "
            "fit(ckpt_path=...)."
        )


def _change_micro_batches(trainer: Trainer, strategy: CutsBatches, plan: ElasticPlan) -> GlobalBatch:
    """Change the batch size and the number of micro-batches; the size of a micro-batch stays."""
    now, micro_batches = plan.cut(strategy.micro_batches)
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if getattr(data, "batch_size", None) != plan.asked.batch_size:
        raise plan.refused(
            f"a pipeline needs batches of {now.batch_size} samples then, in micro_batches={micro_batches}: give them "
            "so, or have a data module with an attribute `batch_size` make the loader"
        )
    data.batch_size = now.batch_size
    strategy.micro_batches = micro_batches
    return now


def _saved_global_batch(checkpoint: Path) -> tuple[GlobalBatch | None, str]:
    """The global batch in the manifest, if any; and why the manifest cannot be read, or ""."""
    try:
        manifest = Manifest.of(checkpoint)
        return manifest.global_batch if manifest is not None else None, ""
    except (ValueError, OSError) as error:
        return None, f"{manifest_path(checkpoint)} cannot be read: {error}. Go on from another checkpoint."


def _warn(trainer: Trainer, words: str) -> None:
    if trainer.is_global_zero:
        log.warning("%s", words)
