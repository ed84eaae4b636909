"""A roofline by hand, and what a compiler changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from azureml_strategy.gpus import find_gpu
from azureml_strategy.planning.fitted import default_parameters
from azureml_strategy.planning.kernels import Efficiency, compute, kernels_of, peak
from azureml_strategy.planning.operators import Operators, list_operators

_PLAIN = Efficiency(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)


def _linear(rows: int, width: int, outputs: int) -> Operators:
    with torch.device("meta"):
        module, inputs = nn.Linear(width, outputs, bias=False), torch.empty(rows, width)
    return list_operators(module, lambda each: each(inputs), rows)


def test_a_product_takes_the_longer_of_operations_and_bytes() -> None:
    gpu = find_gpu("A100 SXM4 80GB")
    assert gpu is not None
    large = compute(kernels_of(_linear(8192, 8192, 8192), compiled=False), gpu, "bf16-true", _PLAIN)
    assert large.device_s[0] == pytest.approx(2 * 8192**3 / 312e12)
    thin = compute(kernels_of(_linear(8, 8192, 8192), compiled=False), gpu, "bf16-true", _PLAIN)
    assert thin.device_s[0] == pytest.approx(2 * (8192 * 8192 + 2 * 8 * 8192) / 2039e9)
    in_float32 = compute(kernels_of(_linear(8, 8192, 8192), compiled=False), gpu, "32-true", _PLAIN)
    assert in_float32.device_s[0] == pytest.approx(2 * thin.device_s[0])


def test_sizes_that_tensor_cores_do_not_take_are_slower_until_they_are_compiled() -> None:
    gpu = find_gpu("A100")
    assert gpu is not None
    slow = replace(_PLAIN, unaligned=0.25)
    odd = _linear(8192, 8192, 8193)
    eager = compute(kernels_of(odd, compiled=False), gpu, "bf16-true", slow)
    compiled = compute(kernels_of(odd, compiled=True), gpu, "bf16-true", slow)
    assert eager.device_s[0] == pytest.approx(4 * compiled.device_s[0], rel=0.01)


def test_the_gpu_waits_for_the_host_where_kernels_are_short() -> None:
    gpu = find_gpu("H100")
    assert gpu is not None
    known = default_parameters().efficiency
    tiny = compute(kernels_of(_linear(8, 8, 8), compiled=False), gpu, "bf16-mixed", known)
    assert tiny.is_launch_bound
    assert tiny.total_s >= tiny.host_s
    large = compute(kernels_of(_linear(8192, 8192, 8192), compiled=False), gpu, "bf16-mixed", known)
    assert not large.is_launch_bound


def test_a_gpu_without_halves_computes_in_float32() -> None:
    gpu = find_gpu("K80")
    assert gpu is not None
    assert peak(gpu, "bf16-mixed") == peak(gpu, "32-true") == pytest.approx(gpu.peaks["32"] * 1e12)


def test_fused_kernels_keep_what_is_read_later() -> None:
    class Chain(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.relu(rows * 2 + 1) @ torch.ones(64, 64, device="meta")

    rows = torch.empty(32, 64, device="meta", requires_grad=True)
    found = list_operators(Chain(), lambda each: each(rows), 32)
    eager, fused = (kernels_of(found, compiled) for compiled in (False, True))
    forward = ~fused.backward
    # It reads the rows once, and writes both factors of the product.
    assert fused.elements[forward][0] == 2 * 32 * 64 + 64 * 64
    assert eager.elements[:3].sum() >= 3 * 2 * 32 * 64
