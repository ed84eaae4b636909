"""Which layers each stage gets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from azureml_strategy.strategies.pipeline.errors import PipelineError

_BY_KIND = "type:"


def check_method(partition: str) -> None:
    """Refuse a way of cutting that there is not.

    Raises:
        PipelineError: it is not `parameters`, `uniform` or `type:KIND`.
    """
    by_kind = partition.startswith(_BY_KIND) and partition != _BY_KIND
    if partition not in ("parameters", "uniform") and not by_kind:
        raise PipelineError(
            f"partition={partition!r} is unknown. Choose 'parameters' (equal sums of parameters), 'uniform' (equal "
            "numbers of layers) or 'type:KIND' (equal numbers of layers of a kind, as 'type:block')."
        )


def stage_bounds(parameters: Sequence[int], kinds: Sequence[str], num_stages: int, partition: str) -> list[int]:
    """Where the chain is cut.

    Args:
        parameters: trainable parameters of each layer.
        kinds: kind of each layer.
        num_stages: number of stages.
        partition: `parameters`, `uniform` or `type:KIND`.

    Returns:
        `num_stages + 1` numbers: stage i has the layers from the i-th up to, not including, the next one.

    Raises:
        PipelineError: more stages than layers, no layer of that kind, or a stage without parameters.
    """
    if num_stages > len(parameters):
        raise PipelineError(
            f"num_stages={num_stages}, but the chain has {len(parameters)} layers, and each stage needs one. Choose "
            f"num_stages={len(parameters)} or less."
        )
    bounds = _cut(parameters, kinds, num_stages, partition)
    held = [sum(parameters[start:stop]) for start, stop in pairwise(bounds)]
    if 0 in held:
        raise PipelineError(
            f"partition={partition!r} cuts {len(parameters)} layers at {bounds}, and stage {held.index(0)} would have "
            f"no trainable parameter (parameters of the layers: {list(parameters)}). Choose fewer stages than "
            f"{num_stages}, or another partition."
        )
    return bounds


def _cut(parameters: Sequence[int], kinds: Sequence[str], num_stages: int, partition: str) -> list[int]:
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    if partition == "uniform":
        return list(map(int, partition_uniform(len(parameters), num_stages)))
    if partition == "parameters":
        return list(map(int, partition_balanced(list(parameters), num_stages)))
    kind = partition.removeprefix(_BY_KIND)
    if kind not in kinds:
        raise PipelineError(f"partition={partition!r}, but the kinds of layers are {', '.join(sorted(set(kinds)))}.")
    return list(map(int, partition_balanced([int(each == kind) for each in kinds], num_stages)))
