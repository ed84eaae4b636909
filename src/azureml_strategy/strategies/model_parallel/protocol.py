"""What a LightningModule tells `azureml_model_parallel` about itself. Each method is optional."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class HasTensorParallelPlan(Protocol):
    """A module whose matrices can be cut over the ranks of a tensor-parallel group."""

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        """Which layers are cut, and how.

        Returns:
            The style of each `nn.Linear` or `nn.Embedding` to cut, by its name in the LightningModule. `*` stands for
            any one part between dots: `{"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}`. Styles are
            those of `azureml_strategy.strategies.model_parallel.plan`.
        """


@runtime_checkable
class HasTensorParallelCounts(Protocol):
    """A module with numbers that the tensor-parallel size must divide, beyond the sizes of its matrices."""

    def tensor_parallel_counts(self) -> Mapping[str, int]:
        """Those numbers by what they count, such as `{"heads": 12}`; asked for before any layer is made."""


@runtime_checkable
class HasShardedBlocks(Protocol):
    """A module that is gathered block by block where its parameters are sharded."""

    def sharded_blocks(self) -> Iterable[nn.Module]:
        """The blocks, each called as a module in the forward pass; no parameter may be shared between two of them.

        What is in no block is gathered for the whole step, such as embeddings, and output matrices tied to them.
        """
