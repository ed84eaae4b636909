"""The end of the pipeline: the LightningModule's own step, on outputs that came through all stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_flatten

from azureml_strategy.strategies.pipeline.errors import PipelineError
from azureml_strategy.strategies.pipeline.logs import SharedLogs
from azureml_strategy.strategies.pipeline.micro_batches import MicroBatch


class LastStage:
    """What DeepSpeed calls with the outputs of each micro-batch to get its loss.

    Args:
        module: whose `training_step`, `validation_step` or `test_step` runs; `self(inputs)` in it gives the outputs.
        logs: take down what it logs.
    """

    def __init__(self, module: LightningModule, logs: SharedLogs) -> None:
        self._module, self._logs = module, logs

    def __call__(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """The loss of a micro-batch; for an evaluation, where DeepSpeed needs no loss, zero.

        Raises:
            PipelineError: the step did something else with the batch than `self(inputs)`, or gave no loss.
        """
        step = getattr(self._module, micro.hook)
        with self._logs.taking_down(micro.samples), _forward_gives(self._module, micro, outputs):
            result = step(micro.batch, *micro.arguments)
        if micro.hook == "training_step":
            return _loss(result)
        return torch.zeros((), device=self._module.device)


@contextmanager
def _forward_gives(module: LightningModule, micro: MicroBatch, outputs: Any) -> Iterator[None]:
    calls = 0

    def forward(*inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        given = inputs[0] if len(inputs) == 1 else inputs
        if calls > 1 or not _same(given, micro.inputs):
            raise PipelineError(
                f"{type(module).__name__}.{micro.hook} calls self(...) "
                + ("a second time" if calls > 1 else "with other inputs than pipeline_batch() gives")
                + ", but in a pipeline the micro-batch has gone through the stages already, once, as pipeline_batch() "
                "gave it. Change inputs in on_after_batch_transfer or in the first layer, and call self(inputs) once."
            )
        return outputs

    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward
    if not calls:
        raise PipelineError(
            f"{type(module).__name__}.{micro.hook} never calls self(inputs), so what the pipeline computed would go "
            "unused. Call it, instead of layers of the module: those of other stages are not in this process."
        )


def _same(given: Any, expected: Any) -> bool:
    """Whether two structures hold the same values; memory is compared only where it is not the very same."""
    (mine, structure), (theirs, other) = tree_flatten(given), tree_flatten(expected)
    return structure == other and all(
        (each.data_ptr() == one.data_ptr() and each.shape == one.shape and each.stride() == one.stride())
        or torch.equal(each, one)
        for each, one in zip(mine, theirs, strict=True)
    )


def _loss(result: Any) -> Tensor:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise PipelineError(
            f"training_step returned {type(result).__name__} instead of a loss. In a pipeline every micro-batch needs "
            "one: return the loss, or a dictionary with it as 'loss'."
        )
    return loss
