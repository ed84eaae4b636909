"""How the ranks of a run share it: the axes of its mesh, the stages of its pipeline, the buckets of its gradients.

And the ranks that differ from one another by their places, each of which a pre-flight tries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def different_ranks(axes: Mapping[str, int]) -> dict[int, str]:
    """Return the ranks that may hold something else than others, each with the words for its place.

    These are the first and the last on each axis, the last on all, and a stage in the middle of a pipeline.

    Args:
        axes: sizes by name; the last one counts fastest.
    """
    sizes = list(axes.values())
    found = {0: "first rank"}
    for number, (name, size) in enumerate(axes.items()):
        ahead = math.prod(sizes[number + 1 :])
        if name == "stages" and size > 2:
            found.setdefault(size // 2 * ahead, "middle stage")
        found.setdefault((size - 1) * ahead, f"last of {name.replace('_', ' ')}")
    found.setdefault(math.prod(sizes) - 1, "last rank")
    return dict(sorted(found.items()))


def axes_of(trainer: Trainer) -> dict[str, int]:
    """Return the sizes of the axes that a run's ranks lie on, the fastest last, once its module is set up.

    A pipeline has `stages` and `replicas`; a mesh has its own names; other strategies have `data_parallel`, and
    `tensor_parallel` where several ranks compute each sample together.
    """
    strategy: Any = trainer.strategy
    world = trainer.world_size
    stages = getattr(strategy, "num_stages", None)
    if stages is not None:
        return {"stages": stages, "replicas": world // stages}
    mesh = getattr(strategy, "device_mesh", None)
    if mesh is not None and mesh.mesh_dim_names:
        return {name: mesh[name].size() for name in mesh.mesh_dim_names}
    replicas = int((strategy.distributed_sampler_kwargs or {}).get("num_replicas", world))
    alike = world // replicas
    return {"data_parallel": replicas, **({"tensor_parallel": alike} if alike > 1 else {})}


def buckets_of(trainer: Trainer) -> list[int]:
    """Return the bytes of DDP's buckets in the order in which they are sent; none under another strategy."""
    from torch.nn.parallel import DistributedDataParallel

    module = trainer.strategy.model
    if not isinstance(module, DistributedDataParallel):
        return []
    told = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    sizes = told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes") or ""
    return [int(each) for each in str(sizes).split(",") if each.strip()]
