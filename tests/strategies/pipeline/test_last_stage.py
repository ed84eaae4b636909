"""The module's own step on the outputs of the pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.strategies.pipeline.modules import Three
from torch import Tensor

from azureml_strategy.strategies.pipeline import PipelineError
from azureml_strategy.strategies.pipeline.last_stage import LastStage
from azureml_strategy.strategies.pipeline.logs import SharedLogs
from azureml_strategy.strategies.pipeline.micro_batches import MicroBatch

ROWS, TARGETS = torch.arange(8.0).view(2, 4), torch.ones(2, 4)


def run(module: Three, hook: str = "training_step", inputs: Tensor = ROWS) -> Any:
    last = LastStage(module, SharedLogs(module, source=0, pipe_group=None, data_group=None))
    return last(module(ROWS), MicroBatch((ROWS, TARGETS), inputs, 2, hook, (0,)))


def test_the_loss_is_the_modules_and_its_graph_leads_to_the_outputs() -> None:
    module = Three()
    loss = run(module)
    assert torch.equal(loss, module.training_step((ROWS, TARGETS), 0))
    loss.backward()
    assert module.network["first"].weight.grad is not None


def test_equal_inputs_elsewhere_in_memory_are_taken() -> None:
    assert run(Three(), inputs=ROWS.clone()).ndim == 0


def test_a_dictionary_with_a_loss() -> None:
    class WithMore(Three):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "more": 1}

    assert isinstance(run(WithMore()), Tensor)


def test_an_evaluation_needs_no_loss() -> None:
    class Evaluated(Three):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen = self(batch[0])

    module = Evaluated()
    run(module, "validation_step")
    assert torch.equal(module.seen, module(ROWS))


class Twice(Three):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch[0]) + self(batch[0])).mean()


class Changed(Three):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0] + 1).mean()


class Never(Three):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network["last"](batch[0]).mean()


class NoLoss(Three):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Twice, "a second time"),
        (Changed, "with other inputs than pipeline_batch"),
        (Never, r"never calls self\(inputs\)"),
        (NoLoss, "NoneType instead of a loss"),
    ],
)
def test_steps_that_a_pipeline_cannot_take(kind: type[Three], words: str) -> None:
    module = kind()
    with pytest.raises(PipelineError, match=words):
        run(module)
    assert torch.equal(module(ROWS), Three()(ROWS)), "forward must be the module's own again"
