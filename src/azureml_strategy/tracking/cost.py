"""Computes what a run costs from the price of a node and the time that the job holds the nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import override

from azureml_strategy.cluster.job import Price, count, read_price
from azureml_strategy.tracking.logger import job_loggers
from azureml_strategy.tracking.timing.goodput import process_age_s
from azureml_strategy.tracking.timing.throughput import find_throughput

_SECONDS_PER_HOUR = 3600.0
_RUN = "cost/run"


class CostTracker(Callback):
    """Logs what the run costs, on rank 0: number of nodes x price of a node x time.

    The time begins when this process starts, which is when the job's command starts, so it includes imports, the start
    of all ranks and the first batches. It excludes what Azure bills outside the command: the start of the node, the
    download of the image, idle time before the cluster scales down, and storage. Several runs in one process (a sweep)
    split its time and never count any of it twice. If a restarted job continues a run, the cost includes its previous
    attempts, except those that were killed before they could log.

    Without a price the callback does nothing; it never assumes one.

    It logs at the end of the run, also at one by an exception or SIGTERM:

    - `cost/run`: all nodes, from the start to the end
    - `cost/per_million_samples`: all nodes, at the measured throughput

    Tags: `cost.price_per_hour`, `cost.currency`, `cost.source`, `cost.date`. The cost per million samples needs a
    `ThroughputCallback` and excludes its warm-up steps, so that it compares cluster sizes and not start-up times.

    Args:
        price_per_hour: price of one node. By default it comes from the job's environment variables; without those there
            is no price.
        currency: of `price_per_hour`.
        clock: returns seconds, like `time.monotonic`.
    """

    # The end of the last run in this process: the cost of the next run begins here.
    _paid_until: ClassVar[float | None] = None

    def __init__(
        self,
        price_per_hour: float | None = None,
        currency: str = "USD",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        source = "tracking.cost.price_per_hour"
        self._given = None if price_per_hour is None else Price(price_per_hour, currency, source)
        self._clock = clock
        self._started: float | None = None
        self._ended: float | None = None
        self.price: Price | None = None

    @property
    def so_far(self) -> float:
        """Cost of the run until now, or until it ended, with its previous attempts, in the price's currency."""
        assert self._started is not None
        return self._previous_cost + self._per_second * ((self._ended or self._clock()) - self._started)

    def per_million_samples(self, samples_per_second: float) -> float:
        """Cost of all nodes while the run trains on a million samples."""
        return 1e6 * self._per_second / samples_per_second

    def describe(self) -> str:
        """The number of nodes and the price, as text."""
        return f"{count(self.nodes, 'node')} x {self.price}"

    @override
    @rank_zero_only
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.price = self._given or read_price()
        if self.price is None:
            return
        self.nodes = trainer.num_nodes
        self._per_second = self.nodes * self.price.per_hour / _SECONDS_PER_HOUR
        paid = CostTracker._paid_until
        self._started = self._clock() - process_age_s() if paid is None else paid
        self._ended = None
        self._previous_cost = 0.0
        tags = {
            "cost.price_per_hour": str(self.price.per_hour),
            "cost.currency": self.price.currency,
            "cost.source": self.price.source,
        }
        if self.price.date:
            tags["cost.date"] = self.price.date
        for logger in job_loggers(trainer):
            self._previous_cost = logger.metric_at_start(_RUN) or 0.0
            logger.log_tags(tags)

    def _end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if self.price is None or self._started is None:
            return
        self._ended = CostTracker._paid_until = self._clock()
        metrics = {_RUN: self.so_far}
        throughput = find_throughput(trainer)
        summary = throughput.summary() if throughput else None
        if summary:
            metrics["cost/per_million_samples"] = self.per_million_samples(summary.samples_per_second)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    on_fit_end = on_exception = _end


def find_cost(trainer: Trainer) -> CostTracker | None:
    """Return the trainer's `CostTracker` if it has one that knows a price."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((each for each in callbacks if isinstance(each, CostTracker) and each.price is not None), None)
