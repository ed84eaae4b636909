"""What a pipeline's stage would be told by the one before: the shapes of the activations that come.

DeepSpeed sends them with the first batch. Here there is no other stage. So a stage computes them: it builds the layers
before its own, and runs a micro-batch through these, in tensors that are never written.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain as joined
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from azureml_strategy.planning.pretended_group import PretendedGroup

if TYPE_CHECKING:
    from azureml_strategy.strategies.pipeline.chain import Chain
    from azureml_strategy.strategies.pipeline.engine import StageEngine


class StageMessages:
    """Answers a stage that waits for the shapes of its inputs. 

    Attributes:
        chain: all layers of the module that is trained.
    """

    def __init__(self) -> None:
        self.chain: Chain | None = None
        self._shapes: list[int] = []

    def install(self, engine_class: Any) -> None:
        """Take the place of what DeepSpeed receives, in all engines of a class."""
        run_batch = engine_class.train_batch

        def train_batch(engine: StageEngine, batches: Iterator[Any]) -> Any:
            first = next(batches)
            self._shapes = self._message(engine, first[0])
            return run_batch(engine, joined([first], batches))

        engine_class.train_batch = train_batch
        PretendedGroup.answer = self._answer  # type: ignore[method-assign]

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
        from azureml_strategy.strategies.pipeline.cutting import as_module

        assert self.chain is not None
        kind = next((each.dtype for each in engine.module.parameters() if each.is_floating_point()), torch.float32)
        with torch.no_grad():
            for index, layer in enumerate(self.chain.layers[:first]):
                built = as_module(layer.build())
                inputs = self.chain.view(index, built.to(kind))(inputs)
        return inputs
