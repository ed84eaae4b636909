"""Looks up GPUs by the driver's name or by their model: peaks, memory and links, from gpus.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Literal

from azureml_strategy.network.vm_sizes import VMSize

Kind = Literal["32", "tf32", "16", "bf16", "fp8"]

# vm_sizes.toml has the memory as Azure says it, which for a GB200 is 3 % more than the data sheet says.
_SAME_MEMORY = 0.05
_WITH_MEMORY = re.compile(r"(?P<model>.+?)[ -]+(?P<memory>\d+) ?GB", re.I | re.A)


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One kind of GPU, as software sees it: a half of a K80, a die of an MI250X. The values are a data sheet's.

    Attributes:
        name: name of this form of the model, such as `A100 SXM4 40GB`.
        model: model as the table of VM sizes writes it, such as `A100`.
        form: `SXM`, `OAM` and `superchip` are joined with all GPUs of a machine; `PCIe` is a card.
        driver: regular expression that the whole name of the driver matches.
        peaks: TFLOP/s by kind of number, dense, without sparsity: `32`, `tf32`, `16`, `bf16`, `fp8`. A kind that the
            GPU does not have is missing.
        memory_gb: memory, in GB.
        memory_bandwidth: bandwidth of the memory, in GB/s, reading and writing together.
        multiprocessors: number of streaming multiprocessors (NVIDIA) or compute units (AMD).
        nvlink_bandwidth: bandwidth of all its NVLink or Infinity Fabric links in one direction, in GB/s; None without.
            For a card it is the bridge to one other, which a machine need not have.
        pcie: generation of PCIe.
        year: year in which it was announced.
        source: origin of these values.
    """

    name: str
    model: str
    form: Literal["SXM", "OAM", "superchip", "PCIe"]
    driver: str
    peaks: MappingProxyType[Kind, float]
    memory_gb: float
    memory_bandwidth: float
    multiprocessors: int
    nvlink_bandwidth: float | None = None
    pcie: int
    year: int
    source: str


def find_gpu(name: str) -> GPU | None:
    """Find a GPU by any of its names.

    Args:
        name: the whole name that the driver reports (`NVIDIA A100-SXM4-40GB`), the name in gpus.toml
            (`A100 SXM4 40GB`), or the model with or without its memory (`A100`, `A100 40GB`). Of several forms that a
            model's name fits, the first of gpus.toml counts.

    Returns:
        The GPU; None for a name that nobody knows, and for a slice of a GPU.
    """
    text = name.strip()
    for gpu in known_gpus():
        if re.fullmatch(gpu.driver, text) or text.lower() == gpu.name.lower():
            return gpu
    with_memory = _WITH_MEMORY.fullmatch(text)
    model, memory = (with_memory["model"], float(with_memory["memory"])) if with_memory else (text, None)
    return next(_of_model(model, memory), None)


def gpu_of(size: VMSize) -> GPU | None:
    """Find the GPU of a VM size by its model, its memory and what joins it to others.

    Args:
        size: a size from `lookup_vm_size`.

    Returns:
        The GPU; None for a CPU size, and for a size that is not in the table: its name does not tell the form, or
        whether it has the whole GPU.
    """
    if size.gpu_model is None or not size.known:
        return None
    is_card = size.interconnect in ("PCIe", "NVLink in pairs")
    found = _of_model(size.gpu_model, size.gpu_memory_gb)
    return next((gpu for gpu in found if (gpu.form == "PCIe") == is_card), None)


@cache
def known_gpus() -> tuple[GPU, ...]:
    """Every GPU of gpus.toml, oldest first."""
    text = files("azureml_strategy").joinpath("gpus.toml").read_text(encoding="utf-8")
    return tuple(GPU(**entry | {"peaks": MappingProxyType(entry["peaks"])}) for entry in tomllib.loads(text)["gpus"])


def _of_model(model: str, memory_gb: float | None) -> Iterator[GPU]:
    for gpu in known_gpus():
        same_memory = memory_gb is None or abs(gpu.memory_gb - memory_gb) <= _SAME_MEMORY * memory_gb
        if gpu.model.lower() == model.lower() and same_memory:
            yield gpu
