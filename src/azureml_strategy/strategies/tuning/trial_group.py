"""The process group of trials, which can end on all ranks when a trial fails on one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.control.channel import within
from azureml_strategy.control.gather import Exchange, GroupExchange, StoreExchange, open_shared_store

Value = TypeVar("Value")
# Seconds between two looks at whether a trial has failed on another rank, which only NCCL needs.
_LOOK_S = 0.5
# An abort waits for nobody.
_ABORT_S = 10.0
# How long a rank whose trial has failed waits for the others. They wait for it in vain if training_step has a
# collective of its own, which is not of this group.
_OTHERS_S = 60.0
# The first line of an error of CUDA's allocator is a paragraph.
_LONGEST_FAULT = 300


class TrialError(Exception):
    """A trial failed on some rank; raised on all. The message says why, and on which: `(OSError: why) on rank 3`."""


class TrialGroup:
    """A process group beside the training's own, for what may fail on one rank while the others are in a collective.

    A rank that fails leaves this group. With gloo its connections close, so that the collectives of the others fail,
    too. NCCL's would wait: so the rank writes into the rendezvous store, and the others look there and abort theirs.
    The training's own group is as it was. Making one is a collective.

    Args:
        rank: this process's global rank.
        world_size: number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._store = open_shared_store(type(self).__name__, rank, world_size, None).store
        self._exchange: Exchange = StoreExchange(self._store) if self._store is not None else GroupExchange(rank)
        self._is_nccl = dist.get_backend() == "nccl"
        self.group: dist.ProcessGroup | None = dist.new_group()
        if self._store is not None and self._is_nccl:
            self._store.channel.every(_LOOK_S, self._abort_if_failed)

    def together(self, trial: Callable[[], Value], forget: Callable[[], None]) -> list[Value]:
        """Run a trial on all ranks.

        Args:
            trial: what may fail, and uses no collective but those of this group.
            forget: drops what holds on to this group, such as DDP, before the group ends.

        Returns:
            What it returned on each rank, in the order of ranks; the same on all ranks.

        Raises:
            TrialError: it failed on some rank.
            RuntimeError: it failed here, and the other ranks are elsewhere.
        """
        found, fault = _attempt(trial)
        results: list[tuple[Value, str | None]] | None
        if fault is None:
            results = self._exchange.gather((found, None))
        else:
            first = self._leave(f"({fault}) on rank {self._rank}", forget)
            results = within(_OTHERS_S, lambda: self._exchange.gather((None, first)))
            if results is None:
                raise RuntimeError(
                    f"A trial of tune=True has failed {first}, and another rank waits for this one in a collective of "
                    "the script's own, such as an all_reduce in training_step. Train with tune=False, or give `tuned` "
                    "a file that was measured where it does not fail."
                )
        faults = [each for _, each in results if each is not None]
        if faults:
            raise TrialError(self._leave(faults[0], forget))
        return [value for value, _ in results]

    def close(self) -> None:
        """End the group; a collective unless a trial has failed."""
        if self._store is not None and self._is_nccl:
            self._store.channel.no_more(self._abort_if_failed)
        group, self.group = self.group, None
        if group is not None:
            dist.destroy_process_group(group)
        self._exchange.leave()
        if self._store is not None:
            self._store.close()

    def _leave(self, fault: str, forget: Callable[[], None]) -> str:
        """End this rank's part of the group after a fault, and return the fault that came first.

        The others follow from that one: they are connections that have closed.
        """
        first = self._store.set_first("fault", fault) if self._store is not None else fault
        group, self.group = self.group, None
        forget()
        if group is not None:
            (_abort_process_group if self._is_nccl else dist.destroy_process_group)(group)
            del group
            gc.collect()  # gloo's connections close with the last reference, and DDP refers to itself
        return first

    def _abort_if_failed(self) -> None:
        """On the channel's thread: end NCCL's collectives if a trial has failed on another rank."""
        group = self.group
        if self._store is not None and group is not None and self._store.get("fault") is not None:
            within(_ABORT_S, group.abort)


def _attempt(trial: Callable[[], Value]) -> tuple[Value | None, str | None]:
    """Return what a trial returned, or why it failed. None of its frames stays: it would hold tensors and the group."""
    try:
        return trial(), None
    except Exception as error:  # whatever a user's module does, the other ranks must not wait for this one
        lines = str(error).strip().splitlines() or [""]
        return None, redact_text(f"{type(error).__name__}: {lines[0]}")[:_LONGEST_FAULT]
