"""Compares the optimizers and schedulers of a resumed training with those of its checkpoint.

Lightning restores them in pairs, and leaves out whatever has no partner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

# What versions of torch write into the state of a scheduler, and others do not.
_OF_VERSIONS = ("verbose",)


@dataclass(frozen=True)
class RestoredParts:
    """What a checkpoint holds of optimizers and schedulers.

    Attributes:
        optimizers: how many; None where a strategy has a file of its own for them.
        schedulers: the names in the state of each.
    """

    optimizers: int | None
    schedulers: Sequence[frozenset[str]]

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any]) -> RestoredParts:
        """Look at a loaded checkpoint.

        Args:
            checkpoint: as a strategy's `load_checkpoint` returns it.
        """
        states = checkpoint.get("optimizer_states")
        return cls(
            len(states) if isinstance(states, Sequence) else None,
            [_names(state) for state in checkpoint.get("lr_schedulers") or ()],
        )

    def warn_of_left_out(self, optimizers: Sequence[Optimizer], schedulers: Sequence[FreshScheduler] | None) -> None:
        """Warn of states that found no optimizer or scheduler, and of those that found no state.

        Args:
            optimizers: of the training.
            schedulers: of the training; None if a callback replaces and restores them.
        """
        found = []
        if self.optimizers is not None and self.optimizers != len(optimizers):
            found.append(_unequal("optimizers", self.optimizers, [type(each).__name__ for each in optimizers]))
        if schedulers is not None and len(self.schedulers) != len(schedulers):
            kinds = [each.kind for each in schedulers]
            found.append(_unequal("schedulers of learning rates", len(self.schedulers), kinds))
        for saved, each in zip(self.schedulers, schedulers or (), strict=False):  # of the others it is said already
            unread = sorted(saved - each.names) if each.is_torchs else ()
            if unread:
                found.append(
                    f"The checkpoint has a scheduler of learning rates with {', '.join(unread)}, which {each.kind} "
                    "does not read: it was another one, whose settings are left out."
                )
        for text in found:
            rank_zero_warn(f"{text} Let configure_optimizers return what it returned, to go on with what they were.")


class FreshScheduler:
    """The names in a scheduler's state before a checkpoint is loaded, which adds the names that it has.

    Args:
        scheduler: of the training.

    Attributes:
        kind: the name of its class.
        is_torchs: whether it is one of torch's. Those of others may write a name only at times.
        names: in its state.
    """

    def __init__(self, scheduler: Any) -> None:
        self.kind = type(scheduler).__name__
        self.is_torchs = type(scheduler).__module__.startswith("torch.")
        self.names = _names(vars(scheduler)) if self.is_torchs else frozenset()


def _unequal(what: str, saved: int, now: Sequence[str]) -> str:
    lost = f"the states of the last {saved - len(now)} are left out"
    new = f"the last begin anew ({', '.join(now[saved:])})"
    return (
        f"The checkpoint has {saved} {what}, and the training has {len(now)}: {lost if saved > len(now) else new}, as "
        "they are restored in their order."
    )


def _names(state: Any) -> frozenset[str]:
    """The names in a scheduler's state, without those that only some versions of torch write."""
    names = map(str, state) if isinstance(state, Mapping) else ()
    return frozenset(name for name in names if not name.startswith("_") and name not in _OF_VERSIONS)
