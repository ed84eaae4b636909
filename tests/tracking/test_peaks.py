from __future__ import annotations

import pytest
import torch

from azureml_strategy.tracking.peaks import gpu_peak_flops, peak_flops


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H200", "bf16-mixed", 989.5),
        ("NVIDIA H100 80GB HBM3", "16-mixed", 989.4),
        ("NVIDIA H100 NVL", "bf16-true", 835.5),
        ("NVIDIA A100-SXM4-40GB", "bf16-mixed", 312),
        ("A100-SXM4-40GB", "bf16-mixed", 312),
        ("NVIDIA A100 80GB PCIe", "16-true", 312),
        ("Tesla V100-SXM2-32GB", "16-mixed", 125),
        ("Tesla V100-PCIE-16GB", "32-true", 14),
        ("Tesla T4", "16-mixed", 65),
        ("NVIDIA GB200", "bf16-mixed", 2500),
        ("AMD Instinct MI300X OAM", "bf16-mixed", 1307.4),
    ],
)
def test_gpus_of_azure(name: str, precision: str, tera: float) -> None:
    assert gpu_peak_flops(name, precision) == tera * 1e12


@pytest.mark.parametrize(
    ("name", "products", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "high", 156),
        ("NVIDIA A100-SXM4-80GB", "highest", 19.5),
        ("Tesla V100-SXM2-16GB", "high", 15.7),
        ("AMD Instinct MI300X", "high", 163.4),
    ],
)
def test_float32_products_may_be_in_tf32(name: str, products: str, tera: float) -> None:
    assert gpu_peak_flops(name, "32-true", products) == tera * 1e12


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "bf16-mixed"),
        ("NVIDIA A10-12Q", "bf16-mixed"),
        ("NVIDIA H300", "bf16-mixed"),
        ("", "bf16-mixed"),
        ("NVIDIA H200", "64-true"),
        ("NVIDIA H200", "transformer-engine"),
        ("Tesla V100-SXM2-32GB", "bf16-mixed"),
    ],
)
def test_what_nobody_has_said_has_no_peak(name: str, precision: str) -> None:
    assert gpu_peak_flops(name, precision) is None


def test_a_cpu_has_no_peak() -> None:
    assert peak_flops(torch.device("cpu"), "32-true") is None
