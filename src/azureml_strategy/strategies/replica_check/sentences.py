"""Warnings of ranks that have come apart."""

from __future__ import annotations

from azureml_strategy.strategies.replica_check.copies import BUFFER, OPTIMIZER, PARAMETER, SCHEDULER
from azureml_strategy.strategies.replica_check.looks import Difference

_MOST_NAMES, _MOST_RANKS = 5, 8
# kind: (what differs, why it is likely and what to do)
_CAUSES = {
    PARAMETER: (
        "parameters",
        "Something has changed them on some ranks alone, such as weights that a callback loads or edits on rank 0, or "
        "gradients that were not averaged. The ranks train different models, and a checkpoint has the one of rank 0. "
        "Do on all ranks what one of them does, before the training starts or in the same hook.",
    ),
    BUFFER: (
        "buffers",
        "Nothing makes them equal, so each rank computes with its own, and a checkpoint has those of rank 0. "
        "azureml_ddp, azureml_model_parallel and azureml_deepspeed keep buffers equal unless broadcast_buffers=False; "
        "or change them by what all ranks have, with torch.distributed.all_reduce.",
    ),
    OPTIMIZER: (
        "settings or counters of optimizers",
        "Ranks that step by other numbers soon have other parameters. Where a metric decides on them, log it for all "
        "ranks, self.log(name, value, sync_dist=True); where a callback or hook sets them, set them on all ranks.",
    ),
    SCHEDULER: (
        "states of schedulers",
        "Their learning rates come apart, and with them the parameters. A scheduler that follows a metric must follow "
        "the same on all ranks: self.log(name, value, sync_dist=True), also where you call scheduler.step(value).",
    ),
}


def sentence(difference: Difference, step: int) -> str:
    """Return a warning of which ranks differ in what, why that is likely, and what to do.

    Args:
        difference: what was found.
        step: of the optimizer, after which it was found at the latest.
    """
    what, why = _CAUSES[difference.kind]
    first, *others = difference.ranks
    these = "; ".join(f"rank {_ranks(each)}" for each in others)
    names = ", ".join(difference.names[:_MOST_NAMES])
    more = f" and {len(difference.names) - _MOST_NAMES:,} more" if len(difference.names) > _MOST_NAMES else ""
    return (
        f"Ranks must have the same {what}, but on {these} these are others than on rank {_ranks(first)}, "
        f"as seen at step {step}: "
        f"{names}{more}. {why}"
    )


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:_MOST_RANKS])) + (" and others" if len(ranks) > _MOST_RANKS else "")
