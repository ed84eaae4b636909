"""Prints what a run achieved in a table at its end."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning_utilities.core.rank_zero import rank_zero_only
from rich.table import Table
from typing_extensions import override

from azureml_strategy.cluster.job import format_money
from azureml_strategy.tracking.cost import CostTracker, find_cost
from azureml_strategy.tracking.logger import JobMLFlowLogger
from azureml_strategy.tracking.network import run_network
from azureml_strategy.tracking.tables import print_table
from azureml_strategy.tracking.throughput import ThroughputSummary, find_throughput

# val/top1, train_acc, accuracy, test/acc_top5, ...
_ACCURACY = re.compile(r"(^|[/_.])(acc|accuracy|top_?\d+)($|[/_.])", re.IGNORECASE)


class RunReport(Callback):
    """Prints a table on rank 0 when `fit` ends, and logs its rates and times as `summary/...`.

    It also logs `summary/nodes`, `summary/devices` and the tag `throughput.unit`, which a scaling study reads.
    Throughput and step time need a `ThroughputCallback`, costs a `CostTracker` that knows a price, and the place of the
    run a `JobMLFlowLogger`; the table omits what is missing.

    Args:
        metrics: names of logged metrics to show; by default those with the name of an accuracy (`acc`, `top1`, ...).
    """

    def __init__(self, metrics: Sequence[str] | None = None) -> None:
        super().__init__()
        self.metrics = metrics
        self._started = 0.0

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.monotonic()

    @override
    @rank_zero_only
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        throughput = find_throughput(trainer)
        summary = throughput.summary() if throughput else None
        rows = [("wall time", str(timedelta(seconds=round(time.monotonic() - self._started))))]
        if throughput and summary:
            rows = [*_throughput_rows(summary, throughput.unit, trainer.world_size), *rows]
            self._log_summary(trainer, summary, throughput.unit)
        elif throughput:
            rows.insert(0, ("throughput", f"not measured: all steps were warm-up ({throughput.warmup_steps})"))
        cost = find_cost(trainer)
        if cost:
            rows += _cost_rows(cost, summary, throughput.unit if throughput else "")
        network = run_network(trainer)
        if network:
            rows.append(("network", network.summary))
        rows += self._metric_rows(trainer)
        _print(rows, next((lo for lo in trainer.loggers if isinstance(lo, JobMLFlowLogger)), None))

    def _log_summary(self, trainer: Trainer, summary: ThroughputSummary, unit: str) -> None:
        shape = {"summary/nodes": float(trainer.num_nodes), "summary/devices": float(trainer.world_size)}
        for logger in self._loggers(trainer):
            logger.log_metrics(summary.as_metrics("summary") | shape, step=trainer.global_step)
            if isinstance(logger, JobMLFlowLogger):
                logger.log_tags({"throughput.unit": unit})

    def _loggers(self, trainer: Trainer) -> list[Logger]:
        return trainer.loggers

    def _metric_rows(self, trainer: Trainer) -> Iterator[tuple[str, str]]:
        values = trainer.callback_metrics
        names = self.metrics if self.metrics is not None else [n for n in values if _ACCURACY.search(n)]
        for name in names:
            yield name, f"{float(values[name]):.4f}" if name in values else "not logged"


def _throughput_rows(summary: ThroughputSummary, unit: str, devices: int) -> list[tuple[str, str]]:
    median_ms, p95_ms = 1e3 * summary.step_time_median_s, 1e3 * summary.step_time_p95_s
    mfu = [("MFU", f"{summary.mfu:.1%}")] if summary.mfu is not None else []
    return [
        (f"{unit}/s", f"{summary.samples_per_second:,.1f}"),
        ("per device", f"{summary.samples_per_second_per_device:,.1f} ({devices} device{'s' * (devices > 1)})"),
        ("step time", f"median {median_ms:.2f} ms, p95 {p95_ms:.2f} ms ({summary.steps} steps after warm-up)"),
        *mfu,
        ("data wait", f"{summary.data_wait_share:.1%} of the step"),
    ]


def _cost_rows(cost: CostTracker, summary: ThroughputSummary | None, unit: str) -> Iterator[tuple[str, str]]:
    assert cost.price is not None
    currency = cost.price.currency
    yield "cost", f"{format_money(cost.so_far)} {currency} ({cost.describe()})"
    if summary:
        per_million = cost.per_million_samples(summary.samples_per_second)
        yield f"cost of 10^6 {unit}", f"{format_money(per_million)} {currency}"


def _print(rows: list[tuple[str, str]], logger: JobMLFlowLogger | None) -> None:
    table = Table(show_header=False)
    location = logger.location if logger else None
    if location:
        rows.append(("run", f"{location.run_name} ({location.run_id})"))
        rows.append(("experiment", location.experiment))
        rows.append(("store", location.store))
    for row in rows:
        table.add_row(*row)
    print_table(table, [f"Open the run: {location.open_with}"] if location else [])
