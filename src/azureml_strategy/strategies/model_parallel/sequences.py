"""Gives the ranks of a sequence-parallel group a part of each sequence, if the module can do with one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

from torch import nn

from azureml_strategy.huggingface.sequence_parallel import SharedSequences
from azureml_strategy.huggingface.transformers_internals import adapters_around, find_models
from azureml_strategy.sequence_parallel import SequenceGroup
from azureml_strategy.strategies.errors import MissingPlanError
from azureml_strategy.strategies.model_parallel.layout import check_counts
from azureml_strategy.strategies.model_parallel.module import counts_of


@runtime_checkable
class CutsSequences(Protocol):
    """A module that can compute a part of each sequence, while other ranks compute the rest."""

    def cut_sequences(self, group: SequenceGroup | None) -> None:
        """Compute this rank's part of each sequence from now on; with None, all of it again.

        The batches stay whole, and so are the losses and outputs that the module returns.
        """


def share_sequences(module: nn.Module, group: SequenceGroup, tensor_parallel_size: int) -> Callable[[], None]:
    """Make a module compute each sequence together with the other ranks of a group.

    Args:
        module: a LightningModule whose layers are made. It has `cut_sequences`, or holds models of transformers.
        group: ranks that get the same batches.
        tensor_parallel_size: ranks that share the heads already.

    Returns:
        A function that makes it compute whole sequences again.

    Raises:
        MissingPlanError: nothing in the module can be shared.
        MeshSizeError: the heads cannot be shared equally.
        PretrainedModelError: a model does something else with several tokens than causal attention.
    """
    axis = "sequence_parallel_size" if tensor_parallel_size == 1 else "tensor_parallel_size * sequence_parallel_size"
    check_counts(group.size * tensor_parallel_size, counts_of(module), axis)
    if isinstance(module, CutsSequences):
        module.cut_sequences(group)
        return partial(module.cut_sequences, None)
    models = find_models(module).values()
    if not models:
        raise MissingPlanError(
            f"sequence_parallel_size={group.size}, but {type(module).__name__} holds no causal language model of "
            "transformers and has no method cut_sequences(group), so nothing says how to share its sequences. Write "
            "sequence_parallel_size=1."
        )
    shared = [SharedSequences(model, adapters_around(module, model), group) for model in models]

    def undo() -> None:
        for each in shared:
            each.remove()

    return undo
