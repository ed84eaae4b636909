"""What a GPU computes at most: the denominator of MFU."""

from __future__ import annotations

import re

import torch

_TERA = 1e12

# FLOP/s / 1e12 of one GPU: dense products on its tensor cores, without sparsity, as the vendors' data sheets have them.
# The pattern must match the whole name that the driver gives, so that a slice of a GPU (MIG, vGPU) has no peak.
# Lightning's own table (lightning.fabric.utilities.throughput, 2.6) knows no `NVIDIA H200`, and has figures with
# sparsity for it and for the H100 NVL.
_PEAKS: dict[str, dict[str, float]] = {
    # NVIDIA V100 data sheet, 2020
    r"Tesla V100-SXM2-\d+GB": {"16": 125, "32": 15.7},
    r"Tesla V100-PCIE-\d+GB": {"16": 112, "32": 14},
    # NVIDIA T4 data sheet, 2019
    r"Tesla T4": {"16": 65, "32": 8.1},
    # NVIDIA A100 data sheet, 2021
    r"(NVIDIA )?A100-(SXM4|PCIE)-\d+GB|NVIDIA A100 80GB PCIe": {"16": 312, "bf16": 312, "tf32": 156, "32": 19.5},
    # NVIDIA H100 architecture white paper, table 2: SXM5
    r"NVIDIA H100 80GB HBM3": {"16": 989.4, "bf16": 989.4, "tf32": 494.7, "32": 66.9},
    # NVIDIA H100 data sheet, column NVL, halved where it is with sparsity
    r"NVIDIA H100 NVL": {"16": 835.5, "bf16": 835.5, "tf32": 417.5, "32": 60},
    # NVIDIA H200 data sheet, column SXM, halved where it is with sparsity
    r"NVIDIA H200": {"16": 989.5, "bf16": 989.5, "tf32": 494.5, "32": 67},
    # NVIDIA GB200 NVL72 and GB300 NVL72 data sheets, a 72nd of the rack, halved where it is with sparsity
    r"NVIDIA GB[23]00": {"16": 2500, "bf16": 2500, "tf32": 1250, "32": 80},
    # AMD Instinct MI300X data sheet, 2023; it computes float32 products in TF32 only where that is asked of its library
    r"AMD Instinct MI300X.*": {"16": 1307.4, "bf16": 1307.4, "32": 163.4},
}
_KINDS = {"bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "16", "16-true": "16", "32-true": "32"}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Floating-point operations that a device can do in a second; None where nobody has said.

    Args:
        device: a GPU; a CPU has no peak here.
        precision: one of Lightning's, such as `bf16-mixed`.
    """
    if device.type != "cuda":
        return None
    return gpu_peak_flops(torch.cuda.get_device_name(device), precision, torch.get_float32_matmul_precision())


def gpu_peak_flops(name: str, precision: str, float32_products: str = "highest") -> float | None:
    """The same from a GPU's name, as `NVIDIA H100 80GB HBM3`.

    Args:
        name: as the driver gives it.
        precision: one of Lightning's.
        float32_products: what `torch.get_float32_matmul_precision` says; all but `highest` let them be in TF32.
    """
    peaks = next((peaks for pattern, peaks in _PEAKS.items() if re.fullmatch(pattern, name)), {})
    kind = _KINDS.get(precision)
    if kind == "32" and float32_products != "highest" and "tf32" in peaks:
        kind = "tf32"
    return peaks[kind] * _TERA if kind in peaks else None
