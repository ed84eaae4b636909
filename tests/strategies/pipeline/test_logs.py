"""What is logged for micro-batches, once for the batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule

from azureml_strategy.strategies.pipeline import PipelineError
from azureml_strategy.strategies.pipeline.logs import SharedLogs


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
        with logs.taking_down(samples):
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
        with logs.taking_down(7):
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
        with logs.taking_down(1):
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
    with SharedLogs(module, 0, None, None).taking_down(1), pytest.raises(PipelineError, match=words):
        module.log("name", **arguments)
