"""Refuses what DeepSpeed's optimizer cannot do, before the first step or at the first one that would be wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isinf
from typing import Any, NoReturn

from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.optim import LBFGS, Optimizer

from azureml_strategy.strategies.errors import ConfigurationError

_RATES = (
    "Leave requires_grad as it is from the start, and give what is to rest a parameter group of its own, whose lr is 0 "
    "until (or from) then; or use strategy='azureml_ddp', or 'azureml_model_parallel', which shards parameters too."
)


def refuse_callbacks(callbacks: Iterable[Callback], cuts_parameters: bool) -> None:
    """Refuse callbacks that change what trains, or that read whole weights where stage 3 cuts parameters."""
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, BaseFinetuning):
            raise ConfigurationError(
                f"{name} unfreezes parameters during the training, but DeepSpeed trains those alone that had "
                f"requires_grad when it started: the others would never change. {_RATES}"
            )
        if isinstance(callback, StochasticWeightAveraging):
            raise ConfigurationError(
                f"{name} copies the module and changes its schedule, which Lightning does not allow with DeepSpeed. "
                "Use strategy='azureml_ddp', or 'azureml_model_parallel' with lightning's EMAWeightAveraging."
            )
        if isinstance(callback, ModelPruning):
            raise ConfigurationError(
                f"{name} puts masked tensors in the place of parameters, but DeepSpeed trains the memory of those it "
                "had at the start: the pruned weights would be others. Prune under strategy='azureml_ddp'."
            )
        if cuts_parameters and isinstance(callback, WeightAveraging):
            raise ConfigurationError(
                f"{name} reads and replaces whole weights after a step, but ZeRO-3 leaves each rank only a part of "
                "them. Use strategy='azureml_deepspeed_stage_2', which keeps parameters whole."
            )


def refuse_optimizers(module: nn.Module, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
    """Refuse several optimizers or schedulers, and LBFGS."""
    name = type(module).__name__
    if len(optimizers) > 1 or len(schedulers) > 1:
        raise ConfigurationError(
            f"{name}.configure_optimizers returns {len(optimizers)} optimizers and {len(schedulers)} schedulers, but "
            "DeepSpeed has one optimizer, which takes all its parameters' steps at once. Return one, with a parameter "
            "group for each learning rate; or, for networks that step in turn, use strategy='azureml_ddp', or "
            "'azureml_model_parallel', which shards parameters too."
        )
    refuse_lbfgs(module, optimizers[0])


def refuse_lbfgs(module: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that computes losses several times in a step."""
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError(
            f"{type(module).__name__} trains by LBFGS, which computes losses several times in a step, while DeepSpeed "
            "has a backward pass for each step. Use another optimizer, or strategy='azureml_ddp'."
        )


def refuse_scalars(module: nn.Module) -> None:
    """Refuse parameters without a dimension, which DeepSpeed cannot send from rank 0, by their full names."""
    scalars = [name for name, parameter in module.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise ConfigurationError(
            f"{', '.join(scalars[:3])} of {type(module).__name__} has no dimension, and DeepSpeed sends parameters as "
            "bytes, which torch makes of vectors. Write nn.Parameter(torch.ones(1)) instead of "
            "nn.Parameter(torch.tensor(1.0))."
        )


def refuse_second_backward(module: nn.Module) -> NoReturn:
    """Refuse a backward pass after another one without a step between."""
    raise ConfigurationError(
        f"{type(module).__name__} has a second backward pass before an optimizer step, but with an offloaded "
        "optimizer, or sums of gradients in float32, DeepSpeed's stages 1 and 2 keep those of one pass. Add the losses "
        "and call manual_backward once; to accumulate over batches, use automatic optimization with "
        "Trainer(accumulate_grad_batches=...); or use "
        "strategy='azureml_ddp', or 'azureml_model_parallel', which shards parameters too."
    )


def warn_of_unfilled_steps(trainer: Trainer) -> None:
    """Warn if the last batches of an epoch do not fill a step. Under other strategies they are a step all the same."""
    batches, accumulated = trainer.num_training_batches, trainer.accumulate_grad_batches
    rest = 0 if isinf(batches) else int(batches) % accumulated
    if rest:
        whole = int(batches) - rest
        advice = f"write Trainer(limit_train_batches={whole})" if whole else "write a smaller accumulate_grad_batches"
        rank_zero_warn(
            f"The last {rest} of the {batches} batches of an epoch do not fill a step of "
            f"accumulate_grad_batches={accumulated}. DeepSpeed takes their gradients into the first step of the next "
            "epoch, and those of the last epoch into none, where other strategies make a smaller step. A schedule over "
            f"trainer.estimated_stepping_batches does not come to its end then. To leave them out, {advice}."
        )


def refuse_own_backward(module: nn.Module) -> NoReturn:
    """Refuse a step before which DeepSpeed has seen no backward pass."""
    raise ConfigurationError(
        f"{type(module).__name__} steps its optimizer without a backward pass that DeepSpeed knows of: it reduces "
        "gradients in its own. Call self.manual_backward(loss) instead of loss.backward(), before each step."
    )


def refuse_group(*_: Any) -> NoReturn:
    """Take the place of `add_param_group` in DeepSpeed's optimizers that have none."""
    raise ConfigurationError(
        "A parameter group was added after the start, but DeepSpeed has laid out the memory of all that trains when it "
        f"started. Make all layers in __init__ or configure_model. {_RATES}"
    )


class StartingParameters:
    """Which of an optimizer's parameters required gradients when DeepSpeed laid out their memory.

    Args:
        module: about to be trained.
        optimizer: torch's, before DeepSpeed has it; None if DeepSpeed makes its own, of all parameters that train.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        groups = [] if optimizer is None else optimizer.param_groups
        ids = {id(each) for group in groups for each in group["params"]}
        named = module.named_parameters()
        self._named = [(name, each) for name, each in named if optimizer is None or id(each) in ids]
        self._trained = self._now()

    def require_same(self) -> None:
        """Check that the same parameters require gradients now."""
        changes = self.changes()
        if changes is not None:
            raise ConfigurationError(changes)

    def changes(self) -> str | None:
        """Say which parameters were frozen or unfrozen since the start, and what to do instead; None if none was."""
        now = self._now()
        if now == self._trained:
            return None
        changed = [
            f"{name} was {'un' if trains else ''}frozen"
            for (name, _), trains, trained in zip(self._named, now, self._trained, strict=True)
            if trains != trained
        ]
        more = f" and {len(changed) - 3} more changed" if len(changed) > 3 else ""
        return (
            f"{', '.join(changed[:3])}{more} after the start, but DeepSpeed goes on to train what had requires_grad "
            "then: an unfrozen parameter would never change, and a frozen one would move on by momentum and "
            f"weight_decay. {_RATES}"
        )

    def _now(self) -> list[bool]:
        return [each.requires_grad for _, each in self._named]
