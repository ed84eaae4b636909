from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from tests.strategies.pipeline.modules import Three
from torch import Tensor

from azureml_strategy.strategies.pipeline import PipelineError
from azureml_strategy.strategies.pipeline.chain import OwnChain
from azureml_strategy.strategies.pipeline.logs import LastStage, SharedLogs
from azureml_strategy.strategies.pipeline.micro_batches import MicroBatch


class Noting(LightningModule):
    """A module that keeps what it is told to log."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[str, tuple[float, dict[str, Any]]] = {}

    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        self.logged[name] = (float(value), kwargs)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_values_become_one_as_reduce_fx_says(group: Any) -> None:
    module = Noting()
    logs = SharedLogs(module, 0, group, group)
    for samples, value in ((3, 1.0), (1, 5.0)):
        with logs.recording(samples):
            module.log("mean", value, prog_bar=True)
            module.log("weighted", torch.tensor([value]), batch_size=2 if value == 1.0 else 6)
            for reduction in ("sum", "max", "min"):
                module.log(reduction, value, reduce_fx=reduction, sync_dist=reduction == "sum")
    assert not module.logged
    logs.repeat(("training_step",))
    assert {name: value for name, (value, _) in module.logged.items()} == {
        "mean": 2.0,
        "weighted": 4.0,
        "sum": 6.0,
        "max": 5.0,
        "min": 1.0,
    }
    assert module.logged["mean"][1] == {"prog_bar": True}
    assert module.logged["weighted"][1] == {"batch_size": 8}
    assert module.logged["sum"][1]["sync_dist_group"] is group


@pytest.mark.parametrize(("weights", "mean"), [((0, 4), 5.0), ((0, 0), 3.0)])
def test_a_weight_of_nothing_counts_for_nothing(group: Any, weights: tuple[int, int], mean: float) -> None:
    module = Noting()
    logs = SharedLogs(module, 0, group, group)
    for weight, value in zip(weights, (1.0, 5.0), strict=True):
        with logs.recording(7):
            module.log("loss", value, batch_size=weight)
    logs.repeat(("training_step",))
    assert module.logged["loss"] == (mean, {"batch_size": sum(weights)})


def test_nothing_logged_is_nothing_repeated(group: Any) -> None:
    module = Noting()
    SharedLogs(module, 0, group, group).repeat(("training_step",))
    assert not module.logged


def test_other_names_than_the_first_time(group: Any) -> None:
    module = Noting()
    logs = SharedLogs(module, 0, group, group)
    for name in ("loss", "accuracy"):
        with logs.recording(1):
            module.log(name, 1.0)
        if name == "accuracy":
            with pytest.raises(PipelineError, match="training_step logged accuracy, but loss with its first batch"):
                logs.repeat(("training_step",))
        else:
            logs.repeat(("training_step",))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"value": object()}, "given a object"),
        ({"value": torch.zeros(2, 1)}, r"of shape \(2, 1\)"),
        ({"value": 1.0, "reduce_fx": torch.mean}, "one of the words 'mean'"),
        ({"value": 1.0, "sync_dist_group": 1}, "Leave sync_dist_group out"),
    ],
)
def test_what_cannot_be_shared(arguments: dict[str, Any], words: str) -> None:
    module = Noting()
    with SharedLogs(module, 0, None, None).recording(1), pytest.raises(PipelineError, match=words):
        module.log("name", **arguments)


ROWS, TARGETS = torch.arange(8.0).view(2, 4), torch.ones(2, 4)


def run(module: Three, hook: str = "training_step", inputs: Tensor = ROWS) -> Any:
    last = LastStage(module, OwnChain(module), SharedLogs(module, source=0, pipe_group=None, data_group=None), False)
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


def test_a_step_may_ask_for_parameters_where_there_are_none() -> None:
    class Asks(Three):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.direct = list(self.parameters(recurse=False))
            return super().training_step(batch, batch_idx)

    module = Asks()
    assert isinstance(run(module), Tensor)
    assert module.direct == []


class Twice(Three):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch[0]) + self(batch[0])).mean()


class Changed(Three):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0] + 1).mean()


class Never(Three):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network["last"](batch[0]).mean()


class Penalty(Three):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch[0]).mean()
        return loss + torch.stack([each.sum() for each in self.parameters()]).sum()


class Freezes(Three):
    """Only after its layers have run: another micro-batch would have other gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch[0]).mean()
        self.network["last"].requires_grad_(False)
        return loss


class NoLoss(Three):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Twice, "a second time"),
        (Changed, "with other inputs than pipeline_batch"),
        (Never, r"never calls self\(inputs\)"),
        (Penalty, r"goes through self.parameters\(\)"),
        (Freezes, "training_step changes requires_grad of network.last.weight, network.last.bias, but"),
        (NoLoss, "NoneType instead of a loss"),
    ],
)
def test_steps_that_a_pipeline_cannot_take(group: Any, kind: type[Three], words: str) -> None:
    module = kind()
    logs = SharedLogs(module, 0, group, group)
    last = LastStage(module, OwnChain(module), logs, False)
    loss = last(module(ROWS), MicroBatch((ROWS, TARGETS), ROWS, 2, "training_step", (0,)))
    assert not loss, "the backward passes of the other stages must run to their end"
    with pytest.raises(PipelineError, match=words):
        logs.repeat(("training_step",))
    assert torch.equal(module(ROWS), Three()(ROWS)), "forward must be the module's own again"
