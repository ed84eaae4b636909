"""The process group that our strategies have made in this process, and how it ends.

Trainers and Fabrics one after another in a process use one group, so the end of a fit must not end it. It ends at the
exit of the process, before the interpreter ends. NCCL complains about a group that nobody destroys. Lightning destroys
those of some strategies, and DeepSpeed none. A group that the user has made is left to the user.

Two things could make that end hang. NCCL's communicators end together: the call waits for the ranks of the node. So a
rank that has failed aborts them, which needs no other rank. And gloo waits for collectives under way, which the others
may never join. So every end has a time limit.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from azureml_strategy.control.channel import within
from azureml_strategy.lightning_internals import leave_process_group

log = logging.getLogger(__name__)

# How long a rank waits for the others at its end. They come within seconds, unless one of them is still computing.
_END_SECONDS = 30.0
# An abort waits for nobody.
_ABORT_SECONDS = 5.0


@dataclass
class _Made:
    """A group that this package has made.

    Attributes:
        group: a weak reference, as a group ends with its last strong one.
        process: id of the process that has made it. A child that is forked later inherits the object, but neither its
            threads nor its connections.
        failed: whether a fit has ended by an error of this rank, so that the others may be inside a collective.
    """

    group: weakref.ref[dist.ProcessGroup]
    process: int
    failed: bool = False


_made: _Made | None = None
# Keeps the world's group after its end, and so rank 0's rendezvous store, which other ranks use until their own end.
_kept: list[Any] = []


def own_process_group() -> None:
    """Mark the group that was just made as this package's, so that it ends with this process."""
    global _made
    assert dist.group.WORLD is not None
    _made = _Made(weakref.ref(dist.group.WORLD), os.getpid())
    leave_process_group()
    atexit.unregister(_end_at_exit)  # of an earlier group; exit handlers run in reverse order
    atexit.register(_end_at_exit)


def owns_process_group() -> bool:
    """Whether the process group was made by this package, in this process."""
    if _made is None or not dist.is_initialized():
        return False
    return _made.group() is dist.group.WORLD and _made.process == os.getpid()


def note_failure(failed: bool) -> None:
    """Note that a fit has ended by an error of this rank, or with False that the next one begins."""
    if _made is not None:
        _made.failed = failed


def end_process_group() -> None:
    """Destroy the process group with all its subgroups, if this package made it. It never raises, and never hangs."""
    if not owns_process_group():
        return
    if _has_failed() and _is_nccl(None):
        _try(_abort_process_group, _ABORT_SECONDS, waits=False)
    else:
        seconds = _ABORT_SECONDS if _has_failed() else _END_SECONDS
        _try(dist.destroy_process_group, seconds, waits=dist.get_world_size() > 1)


def end_subgroup(group: dist.ProcessGroup) -> None:
    """Destroy a group that `torch.distributed.new_group` has made, while the process goes on.

    If this rank has failed, a group of NCCL stays until the exit, which aborts it: the others do not destroy theirs.
    """
    if not (_has_failed() and _is_nccl(group)):
        dist.destroy_process_group(group)


def _end_at_exit() -> None:
    if owns_process_group():
        _kept.append(dist.group.WORLD)
        end_process_group()


def _has_failed() -> bool:
    # Python records the exception that ends a script, but no exit code: `sys.exit(3)` looks like a good end.
    return (_made is not None and _made.failed) or getattr(sys, "last_value", None) is not None


def _is_nccl(group: dist.ProcessGroup | None) -> bool:
    return "nccl" in dist.get_backend(group)


def _try(end: Callable[[], None], seconds: float, waits: bool) -> None:
    """End the group, or leave it after some seconds. `waits` says whether its end needs other ranks."""

    def ended() -> bool:
        try:
            end()
        except Exception as error:  # must not change the script's exit code, nor hide its last messages
            log.warning("The process group could not be destroyed: %s", error)
        return True

    try:
        in_time = within(seconds, ended) is not None
    except RuntimeError:  # from 3.12.0 on, some Pythons start no thread once the interpreter ends
        in_time = ended()
    if not in_time:
        why = ": other ranks are still at work, or have ended in the middle of a collective" if waits else ""
        log.warning(
            "The process group could not be destroyed within %.0f s%s. This process ends without it.", seconds, why
        )
