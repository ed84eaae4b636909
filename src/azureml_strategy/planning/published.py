"""Rates that others have published of one GPU, and NCCL's latencies, from published.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class PublishedRate:
    """How fast one GPU trained, multiplied or copied, as somebody published it. None is what the source does not say.

    Attributes:
        kind: `train`, `gemm` (large matrix products) or `copy` (of large arrays, bytes read and written).
        gpu: the GPU's name or model, as `azureml_strategy.gpus.find_gpu` knows it.
        rate: the figure, in `unit`.
        unit: `images/s`, `sequences/s`, `tokens/s`, `TFLOP/s` or `GB/s`.
        framework: the software and, where it matters, its data.
        network: what was trained, such as `resnet50`; None if nothing was.
        batch: micro-batch of the GPU, in images or sequences.
        precision: Lightning's name, or `tf32`; None for a copy.
        compiled: whether by torch.compile or XLA.
        channels_last: whether images and weights were in NHWC order.
        image_size: height and width of an image, in pixels.
        sequence_length: tokens in a sequence.
        source: where the figure was read.
        year: year of the figure.
        note: what the source leaves open, and what was computed from it.
    """

    kind: Literal["train", "gemm", "copy"]
    gpu: str
    rate: float
    unit: Literal["images/s", "sequences/s", "tokens/s", "TFLOP/s", "GB/s"]
    framework: str
    network: str | None = None
    batch: int | None = None
    precision: str | None = None
    compiled: bool = False
    channels_last: bool | None = None
    image_size: int | None = None
    sequence_length: int | None = None
    source: str
    year: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class PublishedLatency:
    """What NCCL counts for the start of a collective (`base`), or for one of its steps over a link, in microseconds.

    published.toml says how NCCL adds them up.

    Attributes:
        link: `base`, `nvlink`, `pcie` or `network`.
        algorithm: `ring` or `tree`.
        ll: with the protocol for small messages.
        ll128: with the protocol for middle ones, which needs NVLink.
        simple: with the protocol for large ones.
        source: where the figures were read.
        year: year of the figures.
    """

    link: Literal["base", "nvlink", "pcie", "network"]
    algorithm: Literal["ring", "tree"]
    ll: float
    ll128: float
    simple: float
    source: str
    year: int


@cache
def published_rates() -> tuple[PublishedRate, ...]:
    """Every published rate, in the order of published.toml."""
    return tuple(PublishedRate(**entry) for entry in _entries("published", "rates"))


@cache
def published_latencies() -> tuple[PublishedLatency, ...]:
    """Every latency that NCCL's source has for rings and trees."""
    return tuple(PublishedLatency(**entry) for entry in _entries("latency", "values"))


def _entries(part: str, inner: str) -> list[dict[str, Any]]:
    """The inner entries of a part of the file, each with what its group says of all. Their notes are joined."""
    text = files("azureml_strategy.planning").joinpath("published.toml").read_text(encoding="utf-8")
    entries = []
    for group in tomllib.loads(text)[part]:
        for own in group.pop(inner):
            entry = group | own
            if "note" in group and "note" in own:
                entry["note"] = f"{own['note']}; {group['note']}"
            entries.append(entry)
    return entries
