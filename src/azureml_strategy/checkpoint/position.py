"""Lightning's counters of batches, for replicas that read more or fewer of them to a step."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any


def rescale(fit_loop: dict[str, Any], ratio: Fraction, epoch_batches: int | None) -> None:
    """Have the fit loop of a checkpoint stand where it stood, counted in other batches.

    Lightning counts the batches of one replica, in the epoch and in all; steps, epochs and schedulers count by
    themselves.

    Args:
        fit_loop: its state in a checkpoint; changed in place.
        ratio: how many batches there are now for one there was.
        epoch_batches: batches of an epoch now; None where they are not known.
    """
    progress = fit_loop["epoch_loop.batch_progress"]
    _shift(progress["total"], math.ceil(progress["total"]["ready"] * ratio))
    ready = math.ceil(progress["current"]["ready"] * ratio)
    if epoch_batches is None or ready < epoch_batches:
        _shift(progress["current"], ready)
        return
    _shift(progress["current"], epoch_batches)
    progress["is_last_batch"] = True  # what may be left of the epoch is less than a step now: it ends here


def counts_batches_itself(fit_loop: dict[str, Any]) -> bool:
    """Whether a data loader has a state other than a `ResumableLoader`'s: that one counts samples over all replicas."""
    states: list[Any] = fit_loop["state_dict"].get("combined_loader", [])
    return any(not isinstance(each, dict) or each.keys() != {"epoch", "samples"} for each in states)


def _shift(count: dict[str, int], ready: int) -> None:
    """Keep how far the last batch has come: Lightning tells by that where a checkpoint was written."""
    moved = ready - count["ready"]
    for name in count:
        count[name] += moved
