"""Charts of benchmarks/results, as SVG within the page."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from figures import figure, table

_WIDTH, _ROW, _LABEL = 640, 26, 230


@dataclass(frozen=True)
class Chart:
    """Bars of the figures below a path; the first is ours."""

    title: str
    path: str
    bars: tuple[str, ...]
    unit: str
    factor: float = 1.0


CHARTS = (
    Chart(
        "Step of ResNet-50, two gloo ranks",
        "ddp_step/loopback/step_s",
        ("azureml_ddp", "lightning", "torch"),
        "ms",
        1e3,
    ),
    Chart(
        "Step of ResNet-50 between two nodes at 500 Mbit/s",
        "local_sgd_step/500mbit/step_s",
        ("azureml_local_sgd", "overlapped", "PostLocalSGDOptimizer", "azureml_ddp", "computing alone"),
        "s",
    ),
    Chart(
        "Step of a GPT in two pipeline stages", "pipeline_step/step_s", ("azureml_deepspeed_pipeline", "deepspeed"), "s"
    ),
    Chart(
        "What a checkpoint of 403 MB costs a training",
        "checkpoint_stall/cost_s",
        ("JobCheckpoint", "async_save, stager kept", "async_save", "AsyncCheckpointIO"),
        "s",
    ),
    Chart(
        "Logging at every step of 50 ms adds",
        "tracking_overhead/50 ms step, log every 1/added_s",
        ("ours", "lightning"),
        "ms",
        1e3,
    ),
    Chart(
        "Training crops from JPEGs, a second and core",
        "decode_images",
        ("simplejpeg/images_per_cpu_second", "before/images_per_cpu_second", "torchvision/images_per_cpu_second"),
        "",
    ),
    Chart(
        "ResNet-50 on one H100, eager, images a second",
        "resnet50_gpu/eager/images_per_s",
        ("recipe", "lightning", "loop"),
        "",
    ),
)


def markdown() -> str:
    """The charts, and the table of all figures."""
    return "\n".join([*map(_chart, CHARTS), "## All figures\n", table()])


def _chart(chart: Chart) -> str:
    found = {bar: figure(f"{chart.path}/{bar}") for bar in chart.bars}
    most = max(each["high"] for each in found.values())
    rows = [_bar(chart, place, name, values, most) for place, (name, values) in enumerate(found.items())]
    height = _ROW * len(rows) + 6
    start = f'<svg viewBox="0 0 {_WIDTH} {height}" class="chart" role="img" aria-label="{escape(chart.title)}">'
    return f"## {chart.title}\n\n```{{raw}} html\n{start}{''.join(rows)}</svg>\n```\n"


def _bar(chart: Chart, place: int, name: str, values: dict[str, float], most: float) -> str:
    """A bar as long as the median, a line from quartile to quartile, and the number."""
    top, scale = place * _ROW + 4, (_WIDTH - _LABEL - 90) / most
    low, middle, high = (max(0.0, values[key]) * scale for key in ("low", "median", "high"))
    label, number = name.partition("/")[0], f"{values['median'] * chart.factor:.3g} {chart.unit}"
    return (
        f'<text x="{_LABEL - 8}" y="{top + 14}" text-anchor="end">{escape(label)}</text>'
        f'<rect x="{_LABEL}" y="{top}" width="{middle:.1f}" height="18" class="{"ours" if place == 0 else "peer"}"/>'
        f'<line x1="{_LABEL + low:.1f}" x2="{_LABEL + high:.1f}" y1="{top + 9}" y2="{top + 9}"/>'
        f'<text x="{_LABEL + high + 8:.1f}" y="{top + 14}">{number}</text>'
    )
