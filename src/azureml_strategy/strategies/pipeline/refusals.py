"""Refuses, before training starts, what a pipeline cannot do. Each message says what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from azureml_strategy.lightning_internals import is_compiled
from azureml_strategy.strategies.pipeline.partition import PipelineError

# Hooks before one backward pass. Here the passes of the micro-batches overlap, so that no moment is before one of them.
_NEVER_CALLED = ("on_before_zero_grad", "on_before_backward")
_OF_MODULE = (*_NEVER_CALLED, "backward", "optimizer_zero_grad", "configure_gradient_clipping")


def refuse_unsupported(trainer: Trainer, module: LightningModule, precision: str, sync_batchnorm: bool) -> None:
    """Refuse what the pipeline cannot do. Precision and sync_batchnorm are the Trainer's arguments."""
    _refuse_run(trainer, precision, sync_batchnorm)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        _refuse_callback(callback)
    _refuse_module(module)


def refuse_stages_of_copies(stages: Sequence[int], precision: str) -> None:
    """Refuse a stage that has nothing to train but its copy of a tied parameter, on all ranks.

    DeepSpeed counts a tied parameter on its first stage only. Its bfloat16 optimizer would have no gradient on the
    other stage to take a norm of.
    """
    if stages and precision.startswith("bf16"):
        raise PipelineError(
            f"Stage {stages[0]} has no parameter of its own, only a copy of one that an earlier stage has, and with "
            f"precision={precision!r} DeepSpeed cannot train it. Take fewer stages, another partition such as "
            "'uniform', or precision='32-true'; or give its layer a parameter of its own, such as a bias."
        )


def refuse_changes(changes: Sequence[str]) -> None:
    """Refuse to go on after parameters were frozen or unfrozen on a rank; `changes` says which, for each such rank."""
    if changes:
        raise PipelineError(
            f"{changes[0]} In a pipeline, only precision='32-true' with zero_stage=0 has an optimizer that follows "
            "requires_grad."
        )


def refuse_changes_in_step(module: nn.Module, changed: Sequence[str]) -> None:
    """Refuse a training_step that froze or unfroze the parameters of these names, as the layers have run before it."""
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise PipelineError(
            f"{type(module).__name__}.training_step changes requires_grad of {', '.join(changed[:3])}{more}, but in a "
            "pipeline the micro-batch has gone through the layers before the step, and the next one would go through "
            "others. Change it in on_train_batch_start or on_train_epoch_start, on all ranks."
        )


def refuse_optimizers_of_stages(faults: Sequence[str]) -> None:
    """Refuse to train where a stage has no optimizer; `faults` are the errors of all ranks' configure_optimizers."""
    if faults:
        raise PipelineError(
            f"configure_optimizers failed on a stage of the pipeline: {faults[0].rstrip('.')}. On each stage it sees "
            "the stage's parameters alone, and the optimizer needs some of them: take fewer stages, or give it all of "
            "self.parameters()."
        )


def _refuse_run(trainer: Trainer, precision: str, sync_batchnorm: bool) -> None:
    if trainer.state.fn == TrainerFn.PREDICTING:
        raise PipelineError(
            "Trainer.predict would have its predictions on the last stage only. Consolidate a checkpoint and predict "
            "in one process, or with strategy='azureml_ddp'."
        )
    if trainer.accumulate_grad_batches != 1:
        raise PipelineError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}): a pipeline accumulates over the "
            "micro-batches of a batch. Leave it out, and give larger batches and more micro_batches instead."
        )
    if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
        raise PipelineError("DeepSpeed clips gradients by their norm only. Leave out gradient_clip_algorithm='value'.")
    if precision.startswith("16"):
        raise PipelineError(
            f"Trainer(precision={precision!r}): no float16 in a pipeline. Use 'bf16-mixed' or '32-true'."
        )
    if sync_batchnorm:
        raise PipelineError(
            "Trainer(sync_batchnorm=True) would wait for ranks of other stages, which have other layers. Leave it out, "
            "and choose micro-batches that are large enough to normalise over."
        )


def _refuse_callback(callback: Callback) -> None:
    name = type(callback).__name__
    if isinstance(callback, (WeightAveraging, StochasticWeightAveraging, ModelPruning)):
        raise PipelineError(
            f"{name} copies or masks a whole module, but in a pipeline each rank has the layers of its stage. Average "
            "in a callback of your own, by the names in `pl_module.named_parameters()`; or use strategy='azureml_ddp', "
            "or 'azureml_model_parallel', which shards parameters too."
        )
    if isinstance(callback, BaseFinetuning):
        raise PipelineError(
            f"{name} unfreezes layers during the training and gives them to the optimizer, but that of a pipeline was "
            "made of what trained at the start. Freeze layers in __init__ and leave them so; or use "
            "strategy='azureml_ddp', or 'azureml_model_parallel', which shards parameters too."
        )
    for hook in _NEVER_CALLED:
        if is_overridden(hook, callback, Callback):
            raise _never_called(name, hook)


def _refuse_module(module: LightningModule) -> None:
    name = type(module).__name__
    if not module.automatic_optimization:
        raise PipelineError(
            f"{name} optimizes manually, but in a pipeline the backward passes belong to the schedule of the stages. "
            "Leave automatic_optimization at True."
        )
    if is_compiled(module):
        raise PipelineError(
            f"{name} was given to torch.compile as a whole, but runs in parts. Compile the layers where they are made: "
            "`layer.compile()` in the `build` of pipeline_layers()."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter"):
        raise PipelineError(
            f"{name}.training_step takes a dataloader_iter, but a pipeline cuts batches itself. Take a batch instead."
        )
    for hook in _OF_MODULE:
        if is_overridden(hook, module, LightningModule):
            raise _never_called(name, hook)


def _never_called(name: str, hook: str) -> PipelineError:
    return PipelineError(
        f"{name} has its own {hook}(), which a pipeline never calls: the passes of the micro-batches overlap, and "
        "DeepSpeed clips and zeroes the gradients. Use on_after_backward, which comes once after the last micro-batch, "
        "or on_before_optimizer_step; clip with Trainer(gradient_clip_val=...)."
    )
