"""Finds single nodes, of any GPU, that are expected to train as fast as several nodes of another size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from azureml_strategy.gpus import GPU, gpu_of
from azureml_strategy.network.vm_sizes import VMSize
from azureml_strategy.planning.candidates import best_precision
from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.predict import predict

YARDSTICK = "resnet50"
"""The network by which sizes are compared: the one of the reference architecture's chart."""
_LEAST = 1.1  # times as fast: less is within what the planner does not know
_IMAGES = 64  # of a step and GPU: the batch of that chart, which the smallest GPU, a K80, holds


@dataclass(frozen=True)
class LargerNode:
    """One node that replaces several of another size.

    Attributes:
        size: of the node.
        speed_up: its expected rate divided by that of the several nodes, more than 1.
    """

    size: VMSize
    speed_up: float


def nodes_worth(size: VMSize, nodes: int, offered: Iterable[VMSize]) -> list[LargerNode]:
    """Single nodes that are expected to train ResNet-50 faster than several, the slowest of them first.

    Their GPUs have at least as much memory, and what trains with a whole copy on each fits. What is cut over all
    GPUs may need more.

    Args:
        size: of the several nodes.
        nodes: how many.
        offered: sizes to choose from. Those with GPUs of another maker are left out: images for CUDA do not run there.
    """
    own = gpu_of(size)
    together = _rate(size, nodes)
    if own is None or together is None:
        return []
    found = []
    for each in offered:
        gpu, alone = gpu_of(each), _rate(each, 1)
        if gpu is None or alone is None or _is_amd(gpu) != _is_amd(own):
            continue
        if alone >= _LEAST * together and (each.gpu_memory_gb or 0) >= (size.gpu_memory_gb or 0):
            found.append(LargerNode(each, alone / together))
    return sorted(found, key=lambda node: node.speed_up)


def _rate(size: VMSize, nodes: int) -> float | None:
    """Images per second in the precision that a recipe takes; None for a size that the planner does not know."""
    gpu = gpu_of(size)
    if gpu is None:
        return None
    try:
        found = predict(
            YARDSTICK,
            batch_size=_IMAGES,
            vm_size=size.name,
            nodes=nodes,
            precision=best_precision(gpu),
            optimizer="sgd",
        )
    except PlanError:
        return None
    return found.samples_per_second


def _is_amd(gpu: GPU) -> bool:
    return gpu.driver.startswith("AMD")
