"""Counts the floating-point operations of a training step, and gives the peak of a GPU: the two parts of the MFU."""

from __future__ import annotations

import copy
import itertools
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from azureml_strategy.gpus import Kind, find_gpu
from azureml_strategy.interfaces import CountsFlops, NamesInputs

_TERA = 1e12
_KINDS: dict[str, Kind] = {
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "16-mixed": "16",
    "16-true": "16",
    "32-true": "32",
}


def peak_flops(device: torch.device, precision: str, convolutions: float = 0.0) -> float | None:
    """Floating-point operations per second that a GPU can do at one of Lightning's precisions; None if it is not known.

    `convolutions` is the part of the network's operations that are convolutions, 0 to 1. The others are products.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    products, convolved = (
        gpu_peak_flops(name, precision, each) for each in (products_in_tf32(), convolutions_in_tf32())
    )
    if products is None or convolved is None:
        return None
    # Times add up, so the mean is harmonic.
    return 1 / ((1 - convolutions) / products + convolutions / convolved)


def products_in_tf32() -> bool:
    """Whether cuBLAS computes products of float32 matrices in TF32, by torch's newer or older setting."""
    # torch 2.8 has the older setting only. Newer versions refuse to read it once the newer setting was used.
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return torch.get_float32_matmul_precision() != "highest" if newer is None else newer == "tf32"


def convolutions_in_tf32() -> bool:
    """Whether cuDNN computes convolutions of float32 in TF32, as it does by default."""
    newer = getattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision", None)
    return bool(torch.backends.cudnn.allow_tf32) if newer is None else newer == "tf32"


def gpu_peak_flops(name: str, precision: str, tf32: bool = False) -> float | None:
    """The peak of a GPU by the driver's name, such as `NVIDIA H100 80GB HBM3`, and Lightning's name of the precision.

    The peaks are those of gpus.toml. Lightning's own table (lightning.fabric.utilities.throughput, 2.6) does not know
    the name `NVIDIA H200`, and its figures for that GPU and for the H100 NVL are with sparsity.

    With `tf32`, operations on float32 may be in TF32.
    """
    gpu = find_gpu(name)
    kind = _KINDS.get(precision)
    if gpu is None or kind is None:
        return None
    if kind == "32" and tf32 and "tf32" in gpu.peaks:
        kind = "tf32"
    return gpu.peaks[kind] * _TERA if kind in gpu.peaks else None


class Flops(Protocol):
    """Counts the operations of training on a batch, and the part of them so far that are convolutions, 0 to 1."""

    convolutions: float

    def __call__(self, batch: Any) -> float:
        """Operations of training on a batch."""


def flops_of(module: LightningModule) -> Flops | None:
    """Return a counter of the operations of training on a batch; None if the module supports no count.

    A `CountsFlops` counts by its own `training_flops`. For a `NamesInputs` torch counts, once for each shape of a
    sample. Call this before the strategy splits the module: the count is of the whole model, whichever rank computes
    which part.
    """
    if isinstance(module, CountsFlops):
        return _StatedFlops(module)
    return _FlopCounter(module) if isinstance(module, NamesInputs) else None


class _StatedFlops:
    """Asks the module for its operations. The share of convolutions is estimated from the sizes of the weights."""

    def __init__(self, module: Any) -> None:
        self._module = module
        # Weights that configure_model or lazy layers make exist only at the first batch. All other modules are counted
        # now, before the strategy splits them.
        self._is_late = is_overridden("configure_model", module) or any(map(is_lazy, module.parameters()))
        self.convolutions = 0.0 if self._is_late else _convolved(module)

    def __call__(self, batch: Any) -> float:
        if self._is_late:
            self._is_late, self.convolutions = False, _convolved(self._module)
        return float(self._module.training_flops(batch))


def _convolved(module: nn.Module) -> float:
    """Part of the weights that are a convolution's, 0 to 1."""
    sizes = [
        (each, getattr(weight, "ds_numel", weight.numel()))  # ZeRO-3 takes the elements away, and keeps their number
        for each in module.modules()
        for weight in each.parameters(recurse=False)
        if not is_lazy(weight)
    ]
    convolved = sum(size for each, size in sizes if isinstance(each, _ConvNd))
    return convolved / max(sum(size for _, size in sizes), 1)


class _FlopCounter:
    """Counts matrix products, convolutions and attention, forward and backward, on a copy on the meta device.

    The meta device computes nothing, and neither the copy nor its activations need memory.
    """

    def __init__(self, module: LightningModule) -> None:
        tensors = itertools.chain(module.parameters(), module.buffers())
        self._model: Any = copy.deepcopy(module, {id(tensor): _to_meta(tensor) for tensor in tensors})
        self._per_sample: dict[tuple[Any, ...], float] = {}
        self.convolutions = 0.0

    def __call__(self, batch: Any) -> float:
        """Operations of training on a batch; 0 if they cannot be counted."""
        inputs = self._model.pipeline_batch(batch)[0]
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        sample = tuple(tensor.shape[1:] for tensor in tensors)
        if sample not in self._per_sample:
            self._per_sample[sample] = self._measure(inputs) / len(tensors[0])
        return self._per_sample[sample] * len(tensors[0])

    def _measure(self, inputs: Any) -> float:
        on_meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), inputs)
        counter = FlopCounterMode(display=False)
        try:
            with counter:
                outputs = tree_leaves(self._model(on_meta))
                loss = torch.stack([leaf.sum() for leaf in outputs if isinstance(leaf, Tensor)]).sum()
                loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:  # the user's forward pass may fail in any way on meta tensors
            rank_zero_warn(
                f"No MFU: the forward pass of {type(self._model).__name__} cannot be tried on tensors without numbers "
                f"({type(error).__name__}: {error}). Give it a training_flops(batch), the operations of a step."
            )
            return 0.0
        whole = counter.get_total_flops()
        found = counter.get_flop_counts()["Global"]
        self.convolutions = sum(flops for name, flops in found.items() if "conv" in str(name)) / max(whole, 1)
        return whole


def _to_meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.UninitializedParameter):
        return nn.UninitializedParameter(tensor.requires_grad, device="meta", dtype=tensor.dtype)  # type: ignore[call-arg, arg-type]
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().to("meta"), tensor.requires_grad)
    return tensor.to("meta")
