"""Metrics and means over an epoch of a fit that ends between two batches: as if it had never ended."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from tests.multiprocess.scripts.measured import QUIET, Killed, Signs, attempt
from tests.multiprocess.scripts.noisy import Noisy, Numbers, curve
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision

from azureml_strategy.checkpoint.metric_state import metric_settings, metric_state, restore_metric_state

# Nothing is said to be lost, but where a test expects it.
pytestmark = pytest.mark.filterwarnings("error:The checkpoint")


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # what seed_everything writes goes away again
        monkeypatch.setenv(name, "0")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Any]:
    """The undisturbed fit: its weights, and all it logged."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PL_GLOBAL_SEED", "0")
        patched.setenv("PL_SEED_WORKERS", "0")
        folder = tmp_path_factory.mktemp("whole")
        return attempt(folder), curve(folder / "curve.0.jsonl")


@pytest.mark.parametrize("ends", [[1], pytest.param([7], marks=pytest.mark.exhaustive), [30], [12, 37, 53]])
def test_goes_on_with_every_metric(tmp_path: Path, whole: tuple[list[float], Any], ends: list[int]) -> None:
    assert _ended(tmp_path, ends) == whole


def test_goes_on_from_the_first_hook_of_a_batch(tmp_path: Path, whole: tuple[list[float], Any]) -> None:
    assert _ended(tmp_path, [7, 43], in_hook=True) == whole


def _ended(folder: Path, ends: list[int], in_hook: bool = False) -> tuple[list[float], Any]:
    for end in ends:
        with pytest.raises(Killed):
            attempt(folder, end, in_hook)
    return attempt(folder, in_hook=in_hook), curve(folder / "curve.0.jsonl")


def test_the_state_is_plain_data_that_a_safe_reader_takes() -> None:
    trainer, settings = _trainer(_With(Signs()))
    state = metric_state(trainer, settings)
    trainer.lightning_module.metric.update(torch.tensor([-1.0, 2.0]))
    later = metric_state(trainer, settings)
    assert "total" not in settings["metric"]
    assert state["metrics"]["metric"]["values"]["total"] == 0, "copies: an update afterwards does not reach them"
    other, _ = _trainer(_With(Signs()))
    restore_metric_state(other, _through_a_file(later))
    assert other.lightning_module.metric.compute() == trainer.lightning_module.metric.compute()
    assert other.lightning_module.metric.kind is torch.float32


def test_without_metrics_there_is_next_to_nothing() -> None:
    trainer, settings = _trainer(Noisy())
    assert settings == {}
    buffer = io.BytesIO()
    torch.save(metric_state(trainer, settings), buffer)
    assert len(buffer.getvalue()) < 2_000


def test_what_the_script_gives_a_metric_counts_not_what_it_gave_before() -> None:
    trainer, settings = _trainer(_With(Signs(weight=2)))
    trainer.lightning_module.metric.update(torch.ones(3))
    other, _ = _trainer(_With(Signs(weight=5)))
    restore_metric_state(other, metric_state(trainer, settings))
    metric: Any = other.lightning_module.metric
    assert (metric.total, metric.seen, metric.weight) == (6, 3, 5)


def test_metrics_that_share_their_states_have_one_copy_and_share_them_again() -> None:
    def curves() -> LightningModule:
        return _With(MetricCollection([BinaryAUROC(), BinaryAveragePrecision()]))

    trainer, settings = _trainer(curves())
    trainer.lightning_module.metric.update(torch.rand(100_000), torch.ones(100_000).long())
    buffer = io.BytesIO()
    torch.save(metric_state(trainer, settings), buffer)
    assert len(buffer.getvalue()) < 1.1 * 100_000 * (4 + 8)
    other, _ = _trainer(curves())
    restore_metric_state(other, _through_a_file(metric_state(trainer, settings)))
    first, second = other.lightning_module.metric.values(copy_state=False)
    assert first.preds is second.preds


def test_a_state_that_is_joined_over_the_ranks_is_kept_as_it_was_before() -> None:
    trainer, settings = _trainer(_With(CatMetric()))
    metric = trainer.lightning_module.metric
    metric.update(torch.tensor([1.0, 2.0]))
    metric.sync(lambda value, group: [value, value + 10], distributed_available=lambda: True)
    assert metric.value.tolist() == [1, 2, 11, 12]
    other, _ = _trainer(_With(CatMetric()))
    restore_metric_state(other, metric_state(trainer, settings))
    assert other.lightning_module.metric.compute().tolist() == [1, 2]


def test_a_metric_that_the_module_has_no_longer_is_named() -> None:
    trainer, settings = _trainer(_With(MeanMetric()))
    other, _ = _trainer(_With(SumMetric()))
    with pytest.warns(UserWarning, match=r"a metric 'metric' with the states \['mean_value', 'weight'\]"):
        restore_metric_state(other, metric_state(trainer, settings))
    with pytest.warns(UserWarning, match="a metric 'metric'"):
        restore_metric_state(_trainer(Noisy())[0], metric_state(trainer, settings))


class _Objects(Metric):
    """Has what no checkpoint can have: one that stays, one that changes, and one as a state."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("found", [])
        self.function, self.last = print, object()

    def update(self, value: Tensor) -> None:
        self.found.append(object())
        self.last = object()

    def compute(self) -> int:
        return len(self.found)


def test_what_cannot_be_kept_is_named() -> None:
    trainer, settings = _trainer(_With(_Objects()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metric_state(trainer, settings)
    trainer.lightning_module.metric.update(torch.tensor(1.0))
    with pytest.warns(UserWarning, match="lacks found, last of the metric 'metric'"):
        state = metric_state(trainer, settings)
    restore_metric_state(_trainer(_With(_Objects()))[0], _through_a_file(state))


class _OfGroup(Noisy):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("grouped", loss, on_epoch=True, sync_dist_group=object())
        self.log("alone", loss, on_epoch=True)
        return loss


def test_a_mean_over_a_group_of_ranks_is_named() -> None:
    trainer, _ = _trainer(_OfGroup(), limit_train_batches=1)
    trainer.fit_loop.epoch_loop._results.clear()
    with pytest.warns(UserWarning, match=r"over the epoch of training_step\.grouped:"):
        state = _state_within_the_epoch(_OfGroup())
    restore_metric_state(trainer, _through_a_file(state))
    assert "training_step.grouped" not in trainer.fit_loop.epoch_loop._results
    assert "training_step.alone" in trainer.fit_loop.epoch_loop._results


def _state_within_the_epoch(module: LightningModule) -> Any:
    """Of a fit after its first batch."""
    states: list[Any] = []
    module.on_train_batch_end = lambda *_: states.append(metric_state(module.trainer, {}))  # type: ignore[method-assign]
    _trainer(module, limit_train_batches=1)
    return states[0]


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_tensors_come_back_to_the_metric_s_device_but_those_that_were_on_the_host(device: str) -> None:
    trainer, settings = _trainer(_With(Signs()))
    trainer.lightning_module.metric.update(torch.ones(2))
    state = metric_state(trainer, settings)
    state["metrics"]["metric"]["elsewhere"] = ["last"]
    other, _ = _trainer(_With(Signs()))
    other.lightning_module.metric.to(device)
    restore_metric_state(other, state)
    metric: Any = other.lightning_module.metric
    assert (metric.total.device.type, metric.last.device.type, metric.seen) == (device, "cpu", 2)


class _With(Noisy):
    """Noisy with a metric that the test updates."""

    def __init__(self, metric: torch.nn.Module) -> None:
        super().__init__()
        self.metric: Any = metric


def _trainer(module: LightningModule, **arguments: Any) -> tuple[Trainer, Any]:
    """A fit that is over, so that a test can play its hooks; and what its metrics were before."""
    settings = {"max_epochs": 1, "limit_train_batches": 0, "limit_val_batches": 0, **arguments}
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **settings, **QUIET)
    trainer.fit(module, datamodule=Numbers())
    return trainer, metric_settings(trainer)


def _through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
