"""A process group of one process that answers for all: collectives return at once, and send nothing.

torch's own group of this kind, `torch.testing._internal.distributed.fake_pg`, does not serve here. Its work has no
result, so that DDP's reducer ends with an error; and it copies what it gathers, which backs whole models with memory.
This one follows `torch.testing._internal.distributed.multi_threaded_pg`: a `ProcessGroup` in Python, which torch's
reducer and functional collectives call, too. Gathered values are this rank's own. A broadcast keeps this rank's value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

BACKEND = "pretended"
"""Name of the back end for `torch.distributed.init_process_group`."""


# Its annotations are of its own collectives, which another group need not have.
_ProcessGroup: Any = dist.ProcessGroup


class PretendedGroup(_ProcessGroup):  # type: ignore[misc]
    """A group in which this process is one rank of many, and the others are not there.

    Args:
        rank: of this process in the group.
        size: of the group.
    """

    answer: Callable[[Tensor], None] = staticmethod(lambda tensor: None)
    """Fills in a tensor that another rank would send."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._own_rank, self._own_size = rank, size

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the back end."""
        return BACKEND

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._own_rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._own_size

    @property
    def group_name(self) -> str:
        """The name by which functional collectives find the group."""
        return next((name for group, name in dist.distributed_c10d._world.pg_names.items() if group is self), "")

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Leave this rank's values as the sum."""
        return _done(list(tensors) if isinstance(tensors, (list, tuple)) else [tensors])

    allreduce_coalesced = broadcast = reduce = allreduce

    def barrier(self, opts: Any = None) -> Any:
        """Wait for nobody."""
        return _done([torch.empty(0)])

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        """Give this rank's values for those of all ranks."""
        for group, own in zip(outputs, inputs, strict=True):
            for each in group:
                _copy(each, own)
        return _done([list(group) for group in outputs])

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Any:
        """Give this rank's values for those of all ranks, in one tensor."""
        for each in output.detach().flatten().chunk(self._own_size):
            _copy(each, own.detach().flatten())
        return _done([output])

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        """Give this rank's values for those of all ranks, for several tensors."""
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return _done(list(outputs))

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        """Give this rank's own share of its values."""
        for output, parts in zip(outputs, inputs, strict=True):
            _copy(output, parts[self._own_rank])
        return _done(list(outputs))

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        """Give this rank's own share of a tensor."""
        if whole.numel() != output.numel() * self._own_size:
            raise ValueError(
                f"A reduce-scatter over {self._own_size} ranks cuts {whole.numel()} numbers into parts of "
                f"{output.numel()}. Each rank needs an equal part."
            )
        _copy(output.detach().flatten(), whole.detach().flatten().chunk(self._own_size)[self._own_rank])
        return _done([output])

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Give this rank's own share of several tensors."""
        for output, whole in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, whole)
        return _done(list(outputs))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Give this rank's values for those of all ranks, on the rank that asks."""
        return self.allgather(outputs, inputs) if outputs else _done([])

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Give this rank's part, where it has them all."""
        return self.reduce_scatter(outputs, inputs) if inputs else _done(list(outputs))

    def all_to_all_single(self, output: Tensor, own: Tensor, *sizes: Any) -> Any:
        """Leave the output as it is."""
        return _done([output])

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        """Leave the outputs as they are."""
        return _done(list(outputs))

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int = 0) -> Any:
        """Send nothing."""
        return _done(list(tensors))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Any:
        """Leave what would be received as it is, unless `answer` knows it."""
        for each in tensors:
            self.answer(each)
        return _done(list(tensors))

    # Names of the same before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    recv_anysource = recv


def register_pretended_groups() -> None:
    """Register the back end with torch.distributed."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make_group, devices=["cpu"])


def _make_group(store: Any, rank: int, size: int, timeout: Any) -> PretendedGroup:
    return PretendedGroup(rank, size)


def _copy(target: Tensor, own: Tensor) -> None:
    target.detach().copy_(own.detach().view_as(target))


def _done(result: Iterable[Any]) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)
