"""A distributed checkpoint written by threads, which tell one another in other ways than torch's collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, filesystem, metadata, planner, storage  # type: ignore[attr-defined]
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from azureml_strategy.checkpoint.plain_data import require_loadable
from azureml_strategy.control.gather import Exchange
from azureml_strategy.control.messages import register

# What Lightning writes beside the shards.
_REST = "meta.pt"

# What the ranks tell one another of what each has and has written.
register(
    *(metadata.ChunkStorageMetadata, metadata.MetadataIndex, metadata.TensorProperties),
    *(planner.SavePlan, planner.WriteItem, planner.WriteItemType, planner.BytesIOWriteData),
    *(planner.TensorWriteData, storage.WriteResult, filesystem._StorageInfo, filesystem._StoragePrefix),
)


def write_distributed(content: tuple[dict[str, Any], dict[str, Any] | None], path: Path, exchange: Exchange) -> None:
    """Write a folder as `torch.distributed.checkpoint.save` and Lightning do.

    The same steps by the same planner and writer as in torch; only what they tell one another goes another way.

    Args:
        content: the state with this rank's shards; and on rank 0 the rest of the checkpoint.
        path: of the folder.
        exchange: between the ranks.
    """
    state, rest = content
    leads = exchange.rank == 0
    saving, writer = DefaultSavePlanner(), FileSystemWriter(path)

    def plan_own() -> SavePlan:
        saving.set_up_planner(state, is_coordinator=leads)
        writer.set_up_storage_writer(leads)
        return writer.prepare_local_plan(saving.create_local_plan())

    own = exchange.together(plan_own)

    index: list[Metadata] = []  # rank 0's only

    def plan_all() -> list[SavePlan]:
        plans, merged = saving.create_global_plan(own)
        index.append(merged)
        return writer.prepare_global_plan(plans)

    plan = saving.finish_plan(exchange.on_rank_zero(plan_all)[exchange.rank])
    results = exchange.together(lambda: writer.write_data(plan, saving).wait())

    def finish() -> None:
        writer.finish(index[0], results)
        require_loadable(rest)
        torch.save(rest, path / _REST)

    exchange.on_rank_zero(finish)
