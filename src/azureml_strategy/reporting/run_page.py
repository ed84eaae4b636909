"""The page of one run: its verdict, its figures, and what to do next; `run_sections` adds the rest."""

from __future__ import annotations

from collections.abc import Iterator

from azureml_strategy.reporting.advice import last_stop, next_steps, verdict_of
from azureml_strategy.reporting.collect import RunRecord
from azureml_strategy.reporting.formats import count, duration, figure, moment, money
from azureml_strategy.reporting.page import Page, Text, Tile
from azureml_strategy.reporting.run_sections import run_sections
from azureml_strategy.tracking.verdict import mfu_text

_STATUS = {
    "FINISHED": ("finished", "good"),
    "FAILED": ("failed", "bad"),
    "KILLED": ("stopped", "bad"),
    "RUNNING": ("running, or ended without a word", ""),
    "SCHEDULED": ("not started", ""),
}
_STOPPED = {"crash": "An exception ended this run", "hang": "This run hung", "stop": "This run was stopped"}


def run_page(record: RunRecord) -> Page:
    """Make the page of a run.

    Args:
        record: as `collect_run` returns it.
    """
    verdict = verdict_of(record)
    first = verdict.advice[0] if verdict.advice else None
    status, tone = _STATUS.get(record.run.status, (record.run.status.lower(), ""))
    return Page(
        title=record.run.name,
        kicker=f"Report on a run of {record.run.tags.get('azureml_strategy.recipe') or record.run.experiment}",
        headline=verdict.headline,
        verdict={"Why": first.why, "What to try": first.action, "What it would gain": first.gain} if first else {},
        verdict_tone="" if first else "good" if verdict.measured else "neutral",
        status=status,
        tone=tone,
        facts=list(_facts(record)),
        stopped=_stopped(record),
        tiles=list(_tiles(record)),
        steps=next_steps(record, verdict),
        sections=list(run_sections(record)),
        notes=record.notes,
    )


def _facts(record: RunRecord) -> Iterator[str]:
    run, nodes, devices = record.run, record.metric("summary/nodes"), record.metric("summary/devices")
    if run.started_ms is not None:
        yield f"started {moment(run.started_ms)}"
    if run.started_ms is not None and record.ended_ms is not None:
        yield f"took {duration(max(0.0, record.ended_ms - run.started_ms) / 1000)}"
    if nodes is not None and devices is not None:
        yield f"{count(nodes, 'node')}, {count(devices, 'device')}"
    if record.steps is not None:
        yield count(record.steps, "step")
    if len(record.attempts) > 1:
        yield count(len(record.attempts), "attempt")
    yield f"run {run.run_id}"


def _stopped(record: RunRecord) -> Text | None:
    stop = last_stop(record)
    if stop is not None:
        return Text(f"{_STOPPED[stop.kind]} at step {stop.step:,}, on {moment(stop.time_ms)}.", stop.text)
    if record.run.status not in ("FAILED", "KILLED"):
        return None
    step = "before its first step" if record.last_step is None else f"after step {record.last_step:,}"
    return Text(f"This run ended {step}; it left no word of the reason. The log of rank 0 may have one.", "")


def _tiles(record: RunRecord) -> Iterator[Tile]:
    unit = record.run.tags.get("throughput.unit", "samples")
    rate = record.metric("summary/samples_per_second", "throughput/samples_per_second")
    each = record.metric("summary/samples_per_second_per_device", "throughput/samples_per_second_per_device")
    if rate is not None:
        yield Tile(f"{unit} per second", figure(rate), f"{figure(each)} per device" if each is not None else "")
    median = record.metric("summary/step_time_median_s", "throughput/step_time_median_s")
    p95 = record.metric("summary/step_time_p95_s", "throughput/step_time_p95_s")
    if median is not None:
        yield Tile("step, median", f"{figure(1000 * median)} ms", f"95% below {figure(1000 * p95)} ms" if p95 else "")
    mfu = record.metric("summary/mfu", "throughput/mfu")
    if mfu is not None:
        yield Tile("MFU", mfu_text(mfu), "of the devices' peak")
    goodput = record.metric("time/goodput")
    if goodput is not None:
        yield Tile("goodput", f"{goodput:.0%}", "of the time trained")
    cost, currency = record.metric("cost/run"), record.run.tags.get("cost.currency", "USD")
    if cost is not None:
        per_million = record.metric("cost/per_million_samples")
        more = f"{money(per_million, currency)} per million {unit}" if per_million is not None else ""
        yield Tile("cost", money(cost, currency), more)
    # The metric that a reader looks for first.
    names = sorted(record.run.metrics, key=lambda name: (not name.startswith(("val", "eval", "test")), name))
    for word in ("top1", "acc", "loss"):
        found = next((name for name in names if word in name.lower() and name in record.series), None)
        if found is not None:
            yield Tile(found, figure(record.run.metrics[found]), "last value")
            return
