"""A distributed checkpoint written by threads, which tell one another in other ways than torch's collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter  # type: ignore[attr-defined]
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from azureml_strategy.checkpoint.plain_data import require_loadable
from azureml_strategy.strategies.exchange import Exchange

# What Lightning writes beside the shards.
_REST = "meta.pt"


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
    planner, writer = DefaultSavePlanner(), FileSystemWriter(path)

    def plan_own() -> SavePlan:
        planner.set_up_planner(state, is_coordinator=leads)
        writer.set_up_storage_writer(leads)
        return writer.prepare_local_plan(planner.create_local_plan())

    own = exchange.together(plan_own)

    index: list[Metadata] = []  # rank 0's only

    def plan_all() -> list[SavePlan]:
        plans, metadata = planner.create_global_plan(own)
        index.append(metadata)
        return writer.prepare_global_plan(plans)

    plan = planner.finish_plan(exchange.on_rank_zero(plan_all)[exchange.rank])
    results = exchange.together(lambda: writer.write_data(plan, planner).wait())

    def finish() -> None:
        writer.finish(index[0], results)
        require_loadable(rest)
        torch.save(rest, path / _REST)

    exchange.on_rank_zero(finish)
