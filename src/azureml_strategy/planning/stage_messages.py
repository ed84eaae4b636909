"""What a pipeline's stage would be told by the one before: the shapes of the activations that come.

DeepSpeed sends them with the first batch. Here there is no other stage. So a stage computes them: it builds the layers
before its own, and runs a micro-batch through these, in tensors that are never written.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain as joined
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from azureml_strategy.planning.pretended_group import PretendedGroup

if TYPE_CHECKING:
    from azureml_strategy.strategies.pipeline.chain import Chain
    from azureml_strategy.strategies.pipeline.engine import StageEngine


class StageMessages:
    """Answers a stage that waits for the shapes of its inputs. `install` it before a module is cut."""

    def __init__(self) -> None:
        self._chain: Chain | None = None
        self._layers: list[nn.Module] = []
        self._shapes: list[int] = []

    def install(self, strategy: Any) -> None:
        """Take the place of what DeepSpeed receives.

        Args:
            strategy: the module `azureml_strategy.strategies.pipeline.strategy`.
        """
        from azureml_strategy.strategies.pipeline.cutting import as_module

        find, run_batch = strategy.find_chain, strategy.StageEngine.train_batch

        def find_chain(*arguments: Any) -> Chain:
            chain: Chain = find(*arguments)
            self._chain, self._layers = chain, [as_module(layer.build()) for layer in chain.layers]
            return chain

        def train_batch(engine: StageEngine, batches: Iterator[Any]) -> Any:
            first = next(batches)
            self._shapes = self._message(engine, first[0])
            return run_batch(engine, joined([first], batches))

        strategy.find_chain, strategy.StageEngine.train_batch = find_chain, train_batch
        PretendedGroup.answer = self._answer

    def _answer(self, tensor: Tensor) -> None:
        """Fill in a tensor for shapes. They are the only integers in one dimension that a stage receives."""
        if tensor.dtype == torch.int32 and tensor.ndim == 1 and len(self._shapes) <= tensor.numel():
            tensor[: len(self._shapes)] = torch.tensor(self._shapes, dtype=torch.int32)

    def _message(self, engine: StageEngine, inputs: Any) -> list[int]:
        """Return the shapes that come to this stage, in DeepSpeed's words for them."""
        first = min(engine.module.layers)
        if first == 0:
            return []
        outputs = self._outputs_before(first, engine, inputs)
        if isinstance(outputs, Tensor):
            return [0, engine.DTYPE_TO_ID[outputs.dtype], outputs.ndim, *outputs.shape]
        described = [[engine.DTYPE_TO_ID[each.dtype], each.ndim, *each.shape] for each in outputs]
        return [2, len(outputs), *joined.from_iterable(described)]

    def _outputs_before(self, first: int, engine: StageEngine, inputs: Any) -> Any:
        assert self._chain is not None
        kind = next((each.dtype for each in engine.module.parameters() if each.is_floating_point()), torch.float32)
        with torch.no_grad():
            for index, layer in enumerate(self._layers[:first]):
                inputs = self._chain.view(index, layer.to(kind))(inputs)
        return inputs
