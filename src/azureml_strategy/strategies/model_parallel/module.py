"""How a module is cut, sharded and given parts of sequences: by its own methods, or by its models of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, runtime_checkable

from torch import nn

from azureml_strategy.huggingface.sequence_parallel import SharedSequences
from azureml_strategy.huggingface.transformers_internals import (
    adapters_around,
    blocks_of,
    checkpoints_activations,
    find_models,
    find_peft_models,
    head_counts,
    tensor_parallel_plan,
)
from azureml_strategy.interfaces import HasShardedBlocks
from azureml_strategy.sequence_parallel import SequenceGroup
from azureml_strategy.strategies.errors import ConfigurationError, MissingPlanError
from azureml_strategy.strategies.model_parallel.layout import check_counts


@runtime_checkable
class HasTensorParallelPlan(Protocol):
    """A module whose matrices can be cut over the ranks of a tensor-parallel group."""

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        """Say which layers are cut, and how.

        Returns:
            The style of each `nn.Linear` or `nn.Embedding` to cut, by its name in the LightningModule. `*` stands for
            any one part between dots: `{"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}`. Styles are
            those of `azureml_strategy.strategies.model_parallel.plan`.
        """


@runtime_checkable
class HasTensorParallelCounts(Protocol):
    """A module with numbers that the tensor-parallel size must divide, beyond the sizes of its matrices."""

    def tensor_parallel_counts(self) -> Mapping[str, int]:
        """Return the numbers by what they count, such as `{"heads": 12}`. Called before any layer is made."""


def plan_of(module: nn.Module, size: int) -> Mapping[str, str]:
    """Return a module's own tensor-parallel plan, or that of its models of transformers.

    Args:
        module: its layers are made.
        size: of the tensor-parallel group.

    Raises:
        MissingPlanError: there is none, or the models have adapters.
    """
    if isinstance(module, HasTensorParallelPlan):
        return module.tensor_parallel_plan()
    if find_peft_models(module):
        raise MissingPlanError(
            f"tensor_parallel_size={size}, but {type(module).__name__} holds adapters of peft, and no plan says how to "
            "cut those. Write tensor_parallel_size=1, which shards them and their base without cutting them."
        )
    plan: dict[str, str] = {}
    for name, model in find_models(module).items():
        plan_of_model = tensor_parallel_plan(model)
        if not plan_of_model:
            raise MissingPlanError(
                f"tensor_parallel_size={size}, but {type(model).__name__} of transformers has no tensor-parallel plan. "
                "Write tensor_parallel_size=1, which shards it by blocks without cutting them; or give "
                f"{type(module).__name__} a method tensor_parallel_plan()."
            )
        plan |= {f"{name}.{layer}" if name else layer: style for layer, style in plan_of_model.items()}
    if not plan:
        raise MissingPlanError(
            f"tensor_parallel_size={size}, but {type(module).__name__} does not say how to cut its layers. Give it a "
            "method tensor_parallel_plan() that returns names and styles, as in {'layers.*.up': 'colwise', "
            "'layers.*.down': 'rowwise'}; or write tensor_parallel_size=1, which shards it without cutting."
        )
    return plan


def counts_of(module: nn.Module) -> Mapping[str, int]:
    """Return the numbers that the tensor-parallel size must divide, by what they count."""
    if isinstance(module, HasTensorParallelCounts):
        return module.tensor_parallel_counts()
    models = [] if isinstance(module, HasTensorParallelPlan) else find_models(module).values()
    return {name: count for model in models for name, count in head_counts(model).items()}


def sharded_blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the blocks that are gathered one at a time: a module's own, or those of its models of transformers.

    A block of such a model is left out if it shares a parameter with a layer outside of it.
    """
    if isinstance(module, HasShardedBlocks):
        return list(module.sharded_blocks())
    blocks = [block for model in find_models(module).values() for block in blocks_of(model)]
    homes: dict[nn.Parameter, set[nn.Module]] = {}
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            homes.setdefault(parameter, set()).add(each)
    return [block for block in blocks if all(homes[each] <= set(block.modules()) for each in block.parameters())]


def refuse_two_checkpointings(module: nn.Module) -> None:
    """Refuse activation checkpointing of blocks that a model of transformers recomputes already."""
    for model in find_models(module).values():
        if checkpoints_activations(model):
            raise ConfigurationError(
                f"activation_checkpointing=True, and gradient_checkpointing_enable() was called on the "
                f"{type(model).__name__}: each block would be computed three times. Leave one of them out."
            )


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
        module: its layers are made. It has `cut_sequences`, or holds models of transformers.
        group: ranks that get the same batches.
        tensor_parallel_size: ranks that share the heads already.

    Returns:
        A function that makes it compute whole sequences again.

    Raises:
        MissingPlanError: nothing in the module can be shared.
        MeshSizeError: the heads cannot be shared equally.
        PretrainedModelError: a model mixes tokens in another way than by causal attention.
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
