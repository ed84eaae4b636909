from __future__ import annotations

import csv
import json
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from tests.preloaded import Forked
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.tracking import ThroughputCallback
from azureml_strategy.tracking.timing.summary import Totals, summarize
from azureml_strategy.tracking.timing.throughput import count_samples


def test_figures_of_one_rank() -> None:
    totals = Totals(steps=20, samples=80, seconds=2.0, waited_s=0.5)
    summary = summarize(totals, [0.01 * n for n in range(1, 21)], ranks=1, replicas=1)
    assert (summary.steps, summary.samples, summary.seconds) == (20, 80, 2.0)
    assert summary.samples_per_second == summary.samples_per_second_per_device == 40.0
    assert summary.step_time_median_s == pytest.approx(0.105)
    assert summary.step_time_p95_s == pytest.approx(0.19)  # 19 of 20 steps took no longer
    assert summary.data_wait_share == 0.25


def test_ranks_add_samples_but_not_time() -> None:
    one = Totals(10, 40, 1.0, 0.1)
    other = Totals(10, 80, 1.0, 0.3)
    summary = summarize(one.plus(other), [0.1], ranks=2, replicas=2)
    assert summary.samples_per_second == 120
    assert summary.samples_per_second_per_device == 60
    assert summary.data_wait_share == pytest.approx(0.2)
    assert summary.steps == 10


def test_ranks_of_one_replica_count_their_samples_once() -> None:
    totals = Totals(40, 160, 4.0, 0.0)  # 4 ranks, each 40 samples in a second
    summary = summarize(totals, [0.1], ranks=4, replicas=2)
    assert summary.samples_per_second == 80
    assert summary.samples_per_second_per_device == 20


def test_metrics_are_the_rates_and_times() -> None:
    metrics = summarize(Totals(1, 4, 2.0, 1.0), [2.0], ranks=1, replicas=1).as_metrics("throughput")
    assert metrics == {
        "throughput/samples_per_second": 2.0,
        "throughput/samples_per_second_per_device": 2.0,
        "throughput/step_time_median_s": 2.0,
        "throughput/step_time_p95_s": 2.0,
        "throughput/data_wait_share": 0.5,
    }


Pair = namedtuple("Pair", ["images", "labels"])


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(5, 2), torch.zeros(5)], 5),
        ({"input_ids": torch.zeros(7, 2), "mask": torch.zeros(7)}, 7),
        ({"name": "a", "nested": [{"x": torch.zeros(2, 9)}]}, 2),
        (Pair(torch.zeros(4, 1), torch.zeros(4)), 4),
        ([torch.tensor(1.0), torch.zeros(6, 1)], 6),  # a scalar has no samples
        (torch.zeros(0, 3), 0),
    ],
)
def test_leading_dimension_of_the_first_tensor(batch: Any, samples: int) -> None:
    assert count_samples(batch) == samples


@pytest.mark.parametrize("batch", [{"text": "abc"}, [], torch.tensor(1.0), object()])
def test_uncountable_batch_names_the_fix(batch: Any) -> None:
    with pytest.raises(TypeError, match=r"ThroughputCallback\(batch_size="):
        count_samples(batch)


MakeTrainer = Callable[..., Trainer]
WORK_S, WAIT_S = 0.25, 0.0625  # powers of two: sums are exact


class Clock:
    time = 0.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(model: Any, clock: Clock) -> Any:
    """A model whose step takes WORK_S on the clock, and its validation far longer."""
    training_step, validation_step = model.training_step, model.validation_step

    def train(batch: Any, batch_idx: int) -> Any:
        clock.time += WORK_S
        return training_step(batch, batch_idx)

    def validate(batch: Any, batch_idx: int) -> None:
        clock.time += 1000.0
        validation_step(batch, batch_idx)

    model.training_step, model.validation_step = train, validate
    return model


@pytest.fixture
def loader(clock: Clock) -> DataLoader:
    """Twenty batches of four, each WAIT_S on the clock away."""

    def collate(samples: list[Any]) -> torch.Tensor:
        clock.time += WAIT_S
        return [torch.stack([sample[0] for sample in samples])]

    return DataLoader(TensorDataset(torch.ones(80, 4)), batch_size=4, collate_fn=collate)


def check(summary: Any, steps: int, samples_per_step: int = 4, batches: int = 1) -> None:
    step_s = batches * (WORK_S + WAIT_S)
    assert summary.steps == steps
    assert summary.samples == steps * samples_per_step
    assert summary.seconds == steps * step_s
    assert summary.samples_per_second == samples_per_step / step_s
    assert summary.step_time_median_s == summary.step_time_p95_s == step_s
    assert summary.data_wait_share == WAIT_S / (WORK_S + WAIT_S)


def test_measures_a_known_step(timed: Any, loader: DataLoader, clock: Clock, make_trainer: MakeTrainer) -> None:
    callback = ThroughputCallback(warmup_steps=5, clock=clock)
    make_trainer(callbacks=[callback]).fit(timed, loader)
    check(callback.summary(), steps=15)


def test_logs_at_the_steps_of_the_other_metrics(
    timed: Any, loader: DataLoader, clock: Clock, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    callback = ThroughputCallback(warmup_steps=5, clock=clock, minimum_window=5)
    logger = CSVLogger(tmp_path)
    make_trainer(callbacks=[callback], logger=logger, log_every_n_steps=5).fit(timed, loader)
    rows = list(csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines()))
    rates = {int(row["step"]): row for row in rows if row["throughput/samples_per_second"]}
    assert list(rates) == [9, 14, 19]  # the first window is all warm-up
    assert [int(row["step"]) for row in rows if row["train/loss"]] == [4, 9, 14, 19]
    assert float(rates[9]["throughput/samples_per_second"]) == 4 / (WORK_S + WAIT_S)
    assert float(rates[9]["throughput/data_wait_share"]) == WAIT_S / (WORK_S + WAIT_S)
    assert callback.latest is not None
    assert callback.latest.steps == 5


def test_a_window_holds_at_least_ten_steps(
    timed: Any, loader: DataLoader, clock: Clock, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    callback = ThroughputCallback(warmup_steps=0, clock=clock)
    logger = CSVLogger(tmp_path)
    make_trainer(callbacks=[callback], logger=logger, log_every_n_steps=4).fit(timed, loader)
    rows = list(csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows if row["throughput/samples_per_second"]] == [11]
    assert callback.latest is not None
    assert callback.latest.steps == 12


def test_validation_and_epochs_are_no_step_time(
    timed: Any, loader: DataLoader, clock: Clock, make_trainer: MakeTrainer, data: DataLoader
) -> None:
    callback = ThroughputCallback(warmup_steps=0, clock=clock)
    trainer = make_trainer(callbacks=[callback], max_epochs=2, val_check_interval=8, limit_val_batches=1)
    trainer.fit(timed, loader, data)
    check(callback.summary(), steps=40)


def test_a_step_with_a_checkpoint_in_it_is_left_out(
    timed: Any, loader: DataLoader, clock: Clock, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    class SlowCheckpoint(ModelCheckpoint):
        def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
            super().on_train_batch_end(trainer, *arguments)
            clock.time += 500.0 * (trainer.global_step == 10)

    callback = ThroughputCallback(warmup_steps=0, clock=clock)
    checkpoint = SlowCheckpoint(tmp_path, every_n_train_steps=10)
    make_trainer(callbacks=[callback, checkpoint], enable_checkpointing=True).fit(timed, loader)
    check(callback.summary(), steps=19)


def test_accumulated_batches_are_one_step(
    timed: Any, loader: DataLoader, clock: Clock, make_trainer: MakeTrainer
) -> None:
    callback = ThroughputCallback(warmup_steps=1, clock=clock)
    make_trainer(callbacks=[callback], accumulate_grad_batches=4).fit(timed, loader)
    check(callback.summary(), steps=4, samples_per_step=16, batches=4)


def test_real_counts_of_uneven_batches(timed: Any, clock: Clock, make_trainer: MakeTrainer) -> None:
    batches = [[torch.ones(size, 4)] for size in (1, 2, 3, 10)]
    callback = ThroughputCallback(warmup_steps=1, clock=clock)
    make_trainer(callbacks=[callback]).fit(timed, DataLoader(batches, batch_size=None))
    assert callback.summary().samples == 15  # type: ignore[union-attr]


def test_counts_with_the_users_function(timed: Any, clock: Clock, make_trainer: MakeTrainer, data: DataLoader) -> None:
    callback = ThroughputCallback(warmup_steps=0, batch_size=lambda batch: 1000, clock=clock)
    make_trainer(callbacks=[callback], limit_train_batches=3).fit(timed, data)
    assert callback.summary().samples == 3000  # type: ignore[union-attr]


@pytest.mark.parametrize("batches", [2, 5])
def test_shorter_than_the_warm_up_is_not_measured(
    batches: int, timed: Any, loader: DataLoader, clock: Clock, make_trainer: MakeTrainer
) -> None:
    callback = ThroughputCallback(warmup_steps=5, clock=clock)
    make_trainer(callbacks=[callback], limit_train_batches=batches, log_every_n_steps=1).fit(timed, loader)
    assert callback.summary() is None
    assert callback.latest is None


def test_a_resumed_fit_is_measured_by_itself(
    timed: Any, loader: DataLoader, clock: Clock, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    first = make_trainer(max_steps=7, max_epochs=-1)
    first.fit(timed, loader)
    first.save_checkpoint(tmp_path / "last.ckpt")
    callback = ThroughputCallback(warmup_steps=2, clock=clock)
    second = make_trainer(callbacks=[callback], max_steps=17, max_epochs=-1, log_every_n_steps=5)
    second.fit(timed, loader, ckpt_path=tmp_path / "last.ckpt")
    check(callback.summary(), steps=8)


def test_a_fit_without_steps_does_not_repeat_the_figures_before(
    timed: Any, clock: Clock, make_trainer: MakeTrainer, data: DataLoader
) -> None:
    throughput = ThroughputCallback(warmup_steps=0, clock=clock)
    trainer = make_trainer(callbacks=[throughput], max_epochs=1)
    trainer.fit(timed, data)
    assert throughput.summary() is not None
    trainer.fit(timed, data)  # all its epochs are done
    assert throughput.summary() is None
    assert throughput.latest is None


def test_negative_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match="warmup_steps=-1"):
        ThroughputCallback(warmup_steps=-1)


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no step"):
        ThroughputCallback(minimum_window=0)


@pytest.mark.parametrize(("peak", "mfu"), [(None, None), (10_000.0, 0.00128)])
def test_mfu_where_flops_and_peak_are_known(
    peak: float | None, mfu: float | None, timed: Any, loader: DataLoader, clock: Clock, make_trainer: MakeTrainer
) -> None:
    timed.training_flops = lambda batch: float(len(batch[0]))
    callback = ThroughputCallback(warmup_steps=5, clock=clock, peak_flops=peak)
    make_trainer(callbacks=[callback], log_every_n_steps=10).fit(timed, loader)
    summary = callback.summary()
    assert summary is not None
    assert summary.mfu == mfu  # 4 operations in 0.3125 s
    assert ("throughput/mfu" in summary.as_metrics("throughput")) == (mfu is not None)


def test_a_module_that_says_nothing_of_its_flops_has_no_mfu(
    timed: Any, loader: DataLoader, clock: Clock, make_trainer: MakeTrainer
) -> None:
    callback = ThroughputCallback(clock=clock, peak_flops=1.0)
    make_trainer(callbacks=[callback]).fit(timed, loader)
    assert callback.summary().mfu is None  # type: ignore[union-attr]


def test_a_peak_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="peak_flops=-1 is no speed"):
        ThroughputCallback(peak_flops=-1)


RANKS = """
import json, sys
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from azureml_strategy.tracking import ThroughputCallback

class Clock:
    time = 0.0
    def __call__(self): return self.time

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        clock.time += 0.25
        return self.layer(batch).mean()
    def training_flops(self, batch):
        return 1000.0 * len(batch)
    def train_dataloader(self):
        size = 4 if shared else 4 + 4 * self.global_rank
        return torch.utils.data.DataLoader([torch.ones(size, 1)] * 12, batch_size=None)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class SharedReplica(DDPStrategy):
    @property
    def distributed_sampler_kwargs(self): return {"num_replicas": 1, "rank": 0}

shared, clock = sys.argv[1] == "shared", Clock()
callback = ThroughputCallback(warmup_steps=2, clock=clock, peak_flops=96_000.0)
strategy = (SharedReplica if shared else DDPStrategy)(process_group_backend="gloo")
trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, callbacks=[callback], max_epochs=1,
                  log_every_n_steps=5, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, use_distributed_sampler=False)
trainer.fit(Model())
if trainer.is_global_zero:
    window, run = callback.latest, callback.summary()
    print("RESULT", json.dumps([window.samples_per_second, run.samples_per_second, run.samples_per_second_per_device,
                                run.samples, run.steps, run.mfu]))
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("different", [48.0, 48.0, 24.0, 120.0, 10, 0.25]),  # 4 + 8 samples every quarter of a second
        ("shared", [16.0, 16.0, 8.0, 40.0, 10, 16 / 192]),  # the same 4 on both ranks
    ],
)
def test_two_ranks(data: str, expected: list[float], run_script: Callable[..., Forked]) -> None:
    process = run_script(RANKS, data)
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    result = next(line for line in output.splitlines() if line.startswith("RESULT"))
    assert json.loads(result.removeprefix("RESULT")) == expected
