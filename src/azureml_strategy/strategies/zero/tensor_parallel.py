"""DeepSpeed's AutoTP: builds the section of its configuration that cuts a module's matrices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from azureml_strategy.strategies.errors import ConfigurationError, MissingPlanError

# DeepSpeed's names for the styles of a plan.
_PARTITIONS: dict[str, dict[str, Any]] = {
    "colwise": {"partition_type": "column"},
    "colwise_gather_output": {"partition_type": "column", "gather_output": True},
    "rowwise": {"partition_type": "row"},
}


def agreed_size(config: Mapping[str, Any], asked: int) -> int:
    """Return how many ranks share each matrix, from the configuration or the argument.

    Args:
        config: DeepSpeed's configuration; it may have a `tensor_parallel` section.
        asked: the argument; 1 if it was left out.

    Raises:
        ConfigurationError: the two contradict each other.
    """
    said = config.get("tensor_parallel", {}).get("autotp_size") or asked
    if asked not in (1, said):
        raise ConfigurationError(
            f"tensor_parallel_size={asked}, but the DeepSpeed configuration says tensor_parallel.autotp_size={said}. "
            "Leave one of them out."
        )
    return int(said)


def section(module: nn.Module) -> dict[str, Any]:
    """Return the `tensor_parallel` section with which DeepSpeed cuts the module's matrices.

    Args:
        module: its `tensor_parallel_plan()` maps patterns of layer names to styles.

    Raises:
        ConfigurationError: the module has no such method (MissingPlanError), or DeepSpeed lacks one of the styles.
    """
    plan = getattr(module, "tensor_parallel_plan", None)
    if plan is None:
        raise MissingPlanError(
            f"Tensor parallelism was asked for, but {type(module).__name__} has no tensor_parallel_plan(), so nothing "
            "says which matrices to cut. Add it: return {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}, "
            "or give a DeepSpeed configuration with a `tensor_parallel` section of its own."
        )
    specs = []
    for pattern, style in plan().items():
        if style not in _PARTITIONS:
            raise ConfigurationError(
                f"The tensor-parallel plan says {pattern!r}: {style!r}, but DeepSpeed has only "
                f"{', '.join(_PARTITIONS)}."
            )
        # DeepSpeed takes a regex for names of parameters. The `*` of a plan stands for one part between dots.
        layers = re.escape(pattern).replace(r"\*", r"[^.]+")
        specs.append({"patterns": [rf"(.*\.)?{layers}\.(weight|bias)$"], **_PARTITIONS[style]})
    return {"partition_config": {"use_default_specs": False, "layer_specs": specs}}


def cut_layers(module: nn.Module) -> list[nn.Module]:
    """List the layers of a module that DeepSpeed has cut."""
    from deepspeed.module_inject.layers import TensorParallel_Layer

    return [each for each in module.modules() if isinstance(each, TensorParallel_Layer)]


def check_divides(world_size: int, size: int) -> None:
    """Check that the job's processes can be divided into tensor-parallel groups."""
    if world_size % size:
        raise ConfigurationError(
            f"tensor_parallel_size={size} does not divide the {world_size} processes of the job. Choose a divisor of "
            f"{world_size}, at best of the number of GPUs in a node."
        )
