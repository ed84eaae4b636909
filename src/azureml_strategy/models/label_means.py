"""Means in which every label counts the same: over ranks, micro-batches, accumulated batches and evaluation sets."""

from __future__ import annotations

from typing import Any, cast

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DistributedSampler
from typing_extensions import override

from azureml_strategy.huggingface.token_loss import at_least_one, mean_tokens
from azureml_strategy.interfaces import IGNORED_LABEL, AveragesGradients
from azureml_strategy.lightning_internals import accumulates


class MeanOverLabels(LightningModule):
    """A module whose gradients are those of the mean over all labels of an optimizer step, -100 left out.

    Strategies average gradients over ranks, pipelines over micro-batches, and Lightning over accumulated batches. Each
    of these means counts a batch with few labels as much as one with many. So a step divides its sum of losses by the
    mean number of labels of a rank. For accumulated batches, the total is known only with the last one. So their losses
    are divided by the first one's number, and the gradients are scaled to the right mean before they are clipped.

    In an evaluation, the samples that torch's DistributedSampler repeats to fill up the shares of the ranks are given
    the label -100, so that each sample counts once.
    """

    # Mean number of labels of a rank in this batch, or in one of its micro-batches. Losses are divided by it, so it is
    # never 0. None outside of a Trainer.
    _mean_labels: Tensor | None = None
    # The same number, but 0 where there is no label.
    _counted = torch.zeros(())
    # Of accumulated batches: the number that losses are divided by, the sum of all numbers, and the number of batches.
    # None outside of an accumulation.
    _accumulated: tuple[Tensor, Tensor, int] | None = None
    _rows_before = 0  # samples of an evaluation that this rank has read before this batch
    _began_batch = False  # whether the hook of this class ran

    def labels_of(self, batch: Any) -> Any:
        """Return the labels of a batch, the second of a pair. Those in a tensor of integers are counted, but for -100.

        A subclass with steps of its own may have batches of another form. Their labels are None, and nothing is
        weighed.
        """
        return batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None

    def weighed(self, mean_loss: Tensor, labels: Tensor) -> Tensor:
        """Return what `training_step` is to return for the mean loss of a batch's or micro-batch's labels."""
        self.require_count()
        if self._mean_labels is None:
            return mean_loss
        return self.for_step(mean_loss * ((labels != IGNORED_LABEL).sum() / self._mean_labels))

    def require_count(self) -> None:
        """Refuse to train in a Trainer if a subclass's hook has left out the count of the labels.

        Raises:
            MisconfigurationException: it does not call `super()`.
        """
        trainer = self._trainer
        if trainer is None or not trainer.training or self._began_batch:
            return
        if trainer.world_size > 1 or trainer.accumulate_grad_batches > 1:  # else the batch's own mean is the mean
            raise self._without_super("on_train_batch_start", "batch, batch_idx", "counts the labels of all ranks")

    def for_step(self, loss: Tensor) -> Tensor:
        """Weigh the loss of one of several accumulated batches: a sum divided by the batch's mean number of labels."""
        mean = self._mean_labels
        if mean is None or self.trainer.accumulate_grad_batches == 1:
            return loss
        strategy = self.trainer.strategy
        if isinstance(strategy, DeepSpeedStrategy) and not isinstance(strategy, AveragesGradients):
            return loss  # Lightning's own strategy gives no access to its gradients, so they cannot be put right
        first, total, batches = self._accumulated or (mean, torch.zeros_like(mean), 0)
        if batches >= self.trainer.accumulate_grad_batches:
            raise self._without_super("on_after_backward", "", "weighs accumulated batches by their labels")
        self._accumulated = first, total + self._counted, batches + 1
        return loss * (mean / first)

    @override
    def on_train_start(self) -> None:
        self._accumulated = None  # of a fit that failed
        self._began_batch = False

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        labels = self.labels_of(batch)
        self._mean_labels, self._began_batch = None, True
        if _counts(labels):
            self._counted = mean_tokens(labels, self.trainer, shifted=False)
            self._mean_labels = at_least_one(self._counted, self.trainer)
        return None

    @override
    def on_after_backward(self) -> None:
        if self._accumulated is None:
            return
        strategy = self.trainer.strategy
        ends_step = strategy.ends_step() if isinstance(strategy, AveragesGradients) else not accumulates(self.trainer)
        if not ends_step:
            return
        (first, total, batches), self._accumulated = self._accumulated, None
        # At the end of an epoch, fewer batches may be accumulated. Lightning's step is smaller then, and so is this.
        factor = batches * first / at_least_one(total, self.trainer)
        if isinstance(strategy, AveragesGradients):
            strategy.scale_gradients(factor)
            return
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    @override
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        trainer, kind = self.trainer, type(self)
        step, loaders = (
            (kind.test_step, trainer.test_dataloaders)
            if trainer.testing
            else (kind.validation_step, trainer.val_dataloaders)
        )
        if str(step.__module__).partition(".")[0] != __name__.partition(".")[0]:
            return  # only steps of this package are known to leave out what has the label -100
        labels = self.labels_of(batch)
        if not _counts(labels):
            return
        before = self._rows_before if batch_idx else 0
        self._rows_before = before + len(labels)
        once = _samples_read_once(tree_leaves(loaders)[dataloader_idx])
        if once is not None and self._rows_before > once:
            labels[max(once - before, 0) :] = IGNORED_LABEL

    on_test_batch_start = on_validation_batch_start

    def log_evaluation(self, name: str, value: Any, **how: Any) -> None:
        """Log what the running evaluation has found, as `val/NAME` or `test/NAME`."""
        self.log(f"{'test' if self.trainer.testing else 'val'}/{name}", value, sync_dist=True, **how)

    def _without_super(self, hook: str, arguments: str, does: str) -> MisconfigurationException:
        return MisconfigurationException(
            f"{type(self).__name__}.{hook} does not call super().{hook}, which {does}. The means would be of other "
            f"weights, in silence. Write super().{hook}({arguments}) as its first line."
        )


def _counts(labels: Any) -> bool:
    """Whether labels are classes or tokens, and no soft targets."""
    return isinstance(labels, Tensor) and not labels.is_floating_point() and labels.ndim > 0


def _samples_read_once(loader: Any) -> int | None:
    """Return how many samples a rank reads before it repeats some; None if it repeats none, or that is not known.

    Lightning gives torch's DistributedSampler to a loader that has no sampler. It repeats the first samples behind the
    last ones.
    """
    sampler = getattr(loader, "sampler", None)
    samplers = (DistributedSampler, DistributedSamplerWrapper)
    if type(sampler) not in samplers or type(loader.batch_sampler) is not BatchSampler:
        return None
    share = cast(DistributedSampler[Any], sampler)
    if share.drop_last:
        return None
    samples = len(cast(Any, share.dataset))
    return max(-(-(samples - share.rank) // share.num_replicas), 0)
