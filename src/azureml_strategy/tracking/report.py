"""Prints what a run achieved in a table at its end."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import MethodType

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning_utilities.core.rank_zero import rank_zero_only
from rich.table import Table
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from azureml_strategy.cluster.data_parallel import data_parallel_size
from azureml_strategy.cluster.emulated import is_emulated
from azureml_strategy.cluster.job import count, format_money, read_job
from azureml_strategy.gpus import find_gpu
from azureml_strategy.interfaces import Compiles
from azureml_strategy.lightning_internals import has_bucket_size, sends_by_hook
from azureml_strategy.strategies.tuning.record import device_name
from azureml_strategy.tracking.batch import markdown_table
from azureml_strategy.tracking.cost import find_cost
from azureml_strategy.tracking.expected import (
    EXPECTED_RATE_METRIC,
    EXPECTED_RATE_TAG,
    LEAST_STEPS,
    RateCheck,
    RunSetting,
    expected_in_job,
)
from azureml_strategy.tracking.logger import JobMLFlowLogger
from azureml_strategy.tracking.network import run_network
from azureml_strategy.tracking.remedies import SETTINGS, RunFacts
from azureml_strategy.tracking.run import RunLocation
from azureml_strategy.tracking.tables import print_table
from azureml_strategy.tracking.timing.goodput import describe
from azureml_strategy.tracking.timing.rank_times import shares_one_machine
from azureml_strategy.tracking.timing.summary import ThroughputSummary
from azureml_strategy.tracking.timing.throughput import find_throughput
from azureml_strategy.tracking.verdict import NAMES, PHASES, Verdict, judge, mfu_text

# val/top1, train_acc, accuracy, test/acc_top5, ...
_ACCURACY = re.compile(r"(^|[/_.])(acc|accuracy|top_?\d+)($|[/_.])", re.IGNORECASE)


class RunReport(Callback):
    """Prints a table on rank 0 when `fit` ends, and logs its rates and times as `summary/...`.

    It also logs `summary/nodes`, `summary/devices` and the tag `throughput.unit`, which a scaling study reads, and the
    number of measured steps as `summary/steps`, and tags the run with its sizes. Table and remarks become the
    description of the MLflow run. Throughput and step time need a `ThroughputCallback`, costs a `CostTracker` that
    knows a price, and the place of the run a `JobMLFlowLogger`; the table omits what is missing.

    Args:
        metrics: names of logged metrics to show; by default those with the name of an accuracy (`acc`, `top1`, ...).

    Attributes:
        keys: of the recipe that is trained, such as `data.num_workers`, which the verdict may name; None in a script.
    """

    def __init__(self, metrics: Sequence[str] | None = None) -> None:
        super().__init__()
        self.metrics = metrics
        self.keys: frozenset[str] | None = None
        self._started = 0.0

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.monotonic()
        loggers = self._run_loggers(trainer)
        if not loggers:
            return
        job = read_job()
        sizes = {
            "nodes": trainer.num_nodes,
            "devices": trainer.world_size,
            "data_parallel_size": data_parallel_size(trainer),
            "strategy": type(trainer.strategy).__name__,
            "vm_size": job.vm_size if job else None,
            "device": device_name(trainer.strategy.root_device),
            "emulated": "true" if is_emulated(os.environ) else None,
        }
        tags = {f"azureml_strategy.{name}": str(value) for name, value in sizes.items() if value is not None}
        for logger in loggers:
            logger.log_tags(tags)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        tags = {"azureml_strategy.compiled": str(_is_compiled_run(trainer)).lower()}
        optimizer = _optimizer(trainer)
        if optimizer:
            tags["azureml_strategy.optimizer"] = optimizer
        for logger in self._run_loggers(trainer):
            logger.log_tags(tags)

    @override
    @rank_zero_only
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        throughput = find_throughput(trainer)
        summary = throughput.summary() if throughput else None
        loggers, check, tags = self._run_loggers(trainer), check_rate(trainer), dict[str, str]()
        if throughput and summary:
            metrics = summary.as_metrics("summary", step="summary/step") | {
                "summary/nodes": float(trainer.num_nodes),
                "summary/devices": float(trainer.world_size),
                "summary/steps": float(summary.steps),
            }
            tags["throughput.unit"] = throughput.unit
            if check:
                metrics[EXPECTED_RATE_METRIC] = check.expected.samples_per_second
                tags[EXPECTED_RATE_TAG] = check.expected.to_text()
            for each in self._loggers(trainer):
                each.log_metrics(dict(metrics), step=trainer.global_step)
        rows, remarks, verdict = self.rows(trainer), self.remarks(trainer), _verdict(trainer, self.keys)
        if throughput and (hook := throughput.longest_hook()):
            tags["azureml_strategy.longest_hook"] = hook
        if check and check.is_slow:
            remarks.insert(0, check.sentence(verdict))
        if verdict.measured:
            remarks.insert(0, verdict.line)
            tags["azureml_strategy.verdict"] = verdict.line
        for logger in loggers:
            logger.log_tags(tags)
            logger.log_description([*(line for each in remarks for line in (each, "")), *markdown_table(rows)])
        _print(rows, remarks, loggers[0].location if loggers else None)

    def rows(self, trainer: Trainer) -> list[tuple[str, str]]:
        """The figures of the run, the most important ones first: a name and a text each."""
        throughput, cost, network = find_throughput(trainer), find_cost(trainer), run_network(trainer)
        summary = throughput.summary() if throughput else None
        rows = [("wall time", str(timedelta(seconds=round(time.monotonic() - self._started))))]
        if throughput and summary:
            check = check_rate(trainer)
            expected = [("expected", check.row)] if check else []
            rate, *others = _throughput_rows(summary, throughput.unit, trainer.world_size)
            rows = [rate, *expected, *others, *rows]
        elif throughput:
            rows.insert(0, ("throughput", f"not measured: no step after the warm-up ({throughput.warmup_steps} steps)"))
        if cost and cost.price:
            currency = cost.price.currency
            rows.append(("cost", f"{format_money(cost.so_far)} {currency} ({cost.describe()})"))
            if throughput and summary:
                per_million = cost.per_million_samples(summary.samples_per_second)
                rows.append((f"cost of 10^6 {throughput.unit}", f"{format_money(per_million)} {currency}"))
        if summary and summary.shares:
            parts = sorted(summary.shares.items(), key=lambda each: -each[1])
            shown = [f"{NAMES[name]} {share:.1%}" for name, share in parts if share >= 0.001]
            rows.append(("step", ", ".join(shown)))
        if throughput and (clock := throughput.wall_clock()):
            rows.append(("goodput", describe(clock)))
        if throughput and (slowest := throughput.slowest_rank()):
            rows.append(("slowest rank", slowest.text))
        if network:
            rows.append(("network", network.summary))
        values = trainer.callback_metrics
        names = self.metrics if self.metrics is not None else [name for name in values if _ACCURACY.search(name)]
        rows += ((name, f"{float(values[name]):.4f}" if name in values else "not logged") for name in names)
        return rows

    def remarks(self, trainer: Trainer) -> list[str]:
        """Sentences about the run, the most important ones first, each in one line.

        They stand below the table on the console, and above it in the description of the run.
        """
        return [
            f"TensorBoard: tensorboard --logdir {shlex.quote(str(Path(each.log_dir).absolute()))}"
            for each in self._loggers(trainer)
            if isinstance(each, TensorBoardLogger)
        ]

    def _loggers(self, trainer: Trainer) -> list[Logger]:
        return trainer.loggers

    def _run_loggers(self, trainer: Trainer) -> list[JobMLFlowLogger]:
        return [each for each in self._loggers(trainer) if isinstance(each, JobMLFlowLogger)]


def check_rate(trainer: Trainer) -> RateCheck | None:
    """The rate of the run beside the one that was expected of its job.

    Returns:
        None if nothing was expected or measured, on emulated nodes, on hardware that nobody knows, and for a run of
        another setting than the planned one.
    """
    expected, throughput = expected_in_job(os.environ), find_throughput(trainer)
    summary = throughput.summary() if throughput else None
    if expected is None or throughput is None or summary is None or is_emulated(os.environ):
        return None
    if summary.steps < LEAST_STEPS:
        return None
    setting = _setting(trainer, throughput.unit, summary)
    return RateCheck(expected, summary.samples_per_second) if expected.applies_to(setting) else None


def _setting(trainer: Trainer, unit: str, summary: ThroughputSummary) -> RunSetting:
    job = read_job()
    return RunSetting(
        unit=unit,
        samples_per_step=summary.samples / summary.steps,
        vm_size=(job.vm_size if job else None) or "",
        gpu=_gpu_model(trainer.strategy.root_device),
        nodes=trainer.num_nodes,
        devices=trainer.world_size,
        strategy=type(trainer.strategy).__name__,
        precision=str(trainer.precision),
    )


def _gpu_model(device: torch.device) -> str:
    """Model of a GPU, as the table of VM sizes writes it; empty for a CPU, and for a GPU that nobody knows."""
    found = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return found.model if found else ""


def _throughput_rows(summary: ThroughputSummary, unit: str, devices: int) -> list[tuple[str, str]]:
    median_ms, p95_ms = 1e3 * summary.step_time_median_s, 1e3 * summary.step_time_p95_s
    mfu = [("MFU", mfu_text(summary.mfu))] if summary.mfu is not None else []
    return [
        (f"{unit}/s", f"{summary.samples_per_second:,.1f}"),
        ("per device", f"{summary.samples_per_second_per_device:,.1f} ({count(devices, 'device')})"),
        ("step time", f"median {median_ms:.2f} ms, p95 {p95_ms:.2f} ms ({summary.steps} steps after warm-up)"),
        *mfu,
        *([] if summary.shares else [("data wait", f"{summary.data_wait_share:.1%} of the step")]),
    ]


def _verdict(trainer: Trainer, keys: frozenset[str] | None) -> Verdict:
    """What the run waited for most, and what to do about it."""
    throughput, cost, network = find_throughput(trainer), find_cost(trainer), run_network(trainer)
    summary = throughput.summary() if throughput else None
    clock, slow = (throughput.wall_clock(), throughput.slowest_rank()) if throughput else (None, None)
    facts = RunFacts(
        loader_workers=getattr(trainer.train_dataloader, "num_workers", None),
        strategy=type(trainer.strategy).__name__,
        transport=network.kind if network else "",
        nodes=trainer.num_nodes,
        precision=str(trainer.precision),
        optimizer=_optimizer(trainer),
        hook=throughput.longest_hook() if throughput else "",
        mfu=summary.mfu if summary else None,
        compiled=_is_compiled_run(trainer),
        replays=isinstance(trainer.strategy, Compiles) and trainer.strategy.replays_graphs,
        keys=keys,
        slow_ranks=(slow.place,) if slow else (),
        slow_share=slow.share if slow else 0.0,
        steps=summary.steps if summary else 0,
        one_machine=shares_one_machine(trainer),
        settings=_settings(trainer),
        cost=cost.so_far if cost else None,
        currency=cost.price.currency if cost and cost.price else "",
    )
    seconds = {name: getattr(clock, f"{name}_s") for name in PHASES} if clock else {}
    return judge(summary.shares if summary else {}, seconds, facts, summary.errors if summary else {})


def _settings(trainer: Trainer) -> frozenset[str]:
    """Those settings that a verdict may advise and this run has already."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    has = (
        getattr(trainer.train_dataloader, "pin_memory", False),
        any(getattr(each, "asynchronous", False) for each in callbacks if isinstance(each, Checkpoint)),
        sends_by_hook(trainer.strategy),
        has_bucket_size(trainer.strategy),
    )
    return frozenset(name for name, is_set in zip(SETTINGS, has, strict=True) if is_set)


def _is_compiled_run(trainer: Trainer) -> bool:
    """Whether the run trains compiled: by the strategy, which has not begun at `on_train_start`, or by the user."""
    by_strategy = isinstance(trainer.strategy, Compiles) and trainer.strategy.is_compiling
    return by_strategy or has_compiled_parts(trainer.lightning_module)


def has_compiled_parts(module: nn.Module) -> bool:
    """Whether torch.compile was applied to the module, to one inside it, or to an attribute of one of them."""
    return any(_is_compiled(value) for each in module.modules() for value in vars(each).values())


def _is_compiled(value: object) -> bool:
    # Statically, because a module's attribute may be anything. An object of settings may raise KeyError for an
    # attribute that it lacks, and a mock or a proxy claims to have each attribute.
    function = value.__func__ if type(value) is MethodType else value
    return inspect.getattr_static(function, "_torchdynamo_orig_callable", None) is not None


def _optimizer(trainer: Trainer) -> str:
    """The class of the run's optimizer, and whether it is fused; empty if there are several classes, or none."""
    names = set()
    for each in trainer.optimizers:
        inner = _unwrapped(each)
        fused = any(group.get("fused") for group in inner.param_groups)
        names.add(f"{type(inner).__name__}{'(fused=True)' if fused else ''}")
    return names.pop() if len(names) == 1 else ""


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside of DeepSpeed's, or of another one that has it as `optimizer`."""
    inner = getattr(optimizer, "optimizer", None)
    return _unwrapped(inner) if isinstance(inner, Optimizer) else optimizer


def _print(rows: list[tuple[str, str]], remarks: Sequence[str], location: RunLocation | None) -> None:
    table = Table(show_header=False)
    of_run = []
    if location:
        of_run = [
            ("run", f"{location.run_name} ({location.run_id})"),
            ("experiment", location.experiment),
            ("store", location.store),
        ]
    for row in [*rows, *of_run]:
        table.add_row(*row)
    print_table(table, [*remarks, *(location.how_to_open() if location else [])])
