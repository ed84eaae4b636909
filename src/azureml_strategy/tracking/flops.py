"""Floating-point operations of a training step, the GPU's peak, and the share of it that is used (MFU)."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.fabric.utilities.throughput import measure_flops
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

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


@runtime_checkable
class CountsFlops(Protocol):
    """A LightningModule that knows what training on a batch costs."""

    def training_flops(self, batch: Any) -> float:
        """Floating-point operations of a forward and backward pass of the whole model on a batch.

        What is computed a second time, to save memory, does not count, and neither do other ranks' batches.
        """


@runtime_checkable
class NamesInputs(Protocol):
    """A LightningModule whose forward pass on a batch can be tried: `self(self.pipeline_batch(batch)[0])`."""

    def pipeline_batch(self, batch: Any) -> tuple[Any, Any]:
        """What the forward pass takes, and what the loss is computed with."""


def flops_of(module: LightningModule) -> Callable[[Any], float] | None:
    """How to tell the operations of training on a batch; None where the module gives nothing to go by.

    By the module's own `training_flops`; else counted by torch, once for each shape of a sample. Call it before the
    strategy cuts the module: what counts is the whole model, whoever computes which part of it.

    Args:
        module: one that is a `CountsFlops` or a `NamesInputs`.
    """
    if isinstance(module, CountsFlops):
        return module.training_flops
    return _FlopCounter(module).count if isinstance(module, NamesInputs) else None


class _FlopCounter:
    """Counts matrix products, convolutions and attention, forward and backward, on a copy that holds no numbers.

    On the meta device nothing is computed, and neither the copy nor its activations need memory.
    """

    def __init__(self, module: LightningModule) -> None:
        self._model: Any = _on_meta(module)
        self._per_sample: dict[tuple[Any, ...], float] = {}

    def count(self, batch: Any) -> float:
        """Operations of training on a batch; 0 where they cannot be counted."""
        inputs = self._model.pipeline_batch(batch)[0]
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        sample = tuple(tensor.shape[1:] for tensor in tensors)
        if sample not in self._per_sample:
            self._per_sample[sample] = self._measure(inputs) / len(tensors[0])
        return self._per_sample[sample] * len(tensors[0])

    def _measure(self, inputs: Any) -> float:
        without_numbers = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), inputs)
        try:
            return measure_flops(self._model, lambda: self._model(without_numbers), _sum)
        except Exception as error:  # whatever a forward pass of the user's does without numbers: training must go on
            rank_zero_warn(
                f"No MFU: the forward pass of {type(self._model).__name__} cannot be tried on tensors without numbers "
                f"({type(error).__name__}: {error}). Give it a training_flops(batch), the operations of a step."
            )
            return 0.0


def _sum(outputs: Any) -> Tensor:
    return torch.stack([leaf.sum() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]).sum()


def _on_meta(module: nn.Module) -> nn.Module:
    tensors = itertools.chain(module.parameters(), module.buffers())
    return copy.deepcopy(module, {id(tensor): _without_numbers(tensor) for tensor in tensors})


def _without_numbers(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().to("meta"), tensor.requires_grad)
    return tensor.to("meta")
