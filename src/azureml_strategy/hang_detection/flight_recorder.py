"""Reads torch's flight recorder: which collectives this process has entered, and which are not complete."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from azureml_strategy.hang_detection.main_thread import own_place

_SIZES = {name: dtype.itemsize for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
# The recorder uses ATen's names of the data types.
_SIZES |= {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1}

Trace = dict[str, Any]


@dataclass(frozen=True)
class Collective:
    """One collective operation that a rank has entered.

    Attributes:
        group: torch's name of the process group, the same on all its ranks.
        ranks: all ranks of the group; empty for a message between two ranks, whose numbers the others do not share.
        number: its number in the group's order, counted from 1.
        operation: name, such as `all_reduce`.
        size_bytes: size of its input on this rank.
        entered_at: time in seconds since 1970.
        over: whether it is complete on this rank.
        newest: number of the newest collective that this rank has entered in the group.
        place: where in Python it was called; empty if that is not known.
    """

    group: str
    ranks: tuple[int, ...]
    number: int
    operation: str
    size_bytes: int
    entered_at: float
    over: bool
    newest: int
    place: str = ""

    def __str__(self) -> str:
        return f"{self.operation} #{self.number} of {_readable(self.size_bytes)}"


def record(stacks: bool, since: float) -> Trace | None:
    """Return the content of the recorder; None if this torch has no recorder for the backend in use.

    Args:
        stacks: whether to include the Python frames of each call, which takes seconds the first time.
        since: time in seconds since 1970; older entries are left out. The recorder keeps the entries of a destroyed
            group, and the next group has the same name.
    """
    dump = _dumper()
    if dump is None:
        return None
    trace: Trace = pickle.loads(dump(includeCollectives=True, includeStackTraces=stacks, onlyActive=False))
    if "entries" not in trace:
        return None
    # torch's analyser needs names and ranks of the groups in this format. It stops at an entry of a group that it has
    # no name for, such as gloo's or a destroyed one, so these are left out.
    groups = {
        name: {"name": name, "desc": group.group_desc, "ranks": str(dist.get_process_group_ranks(group))}
        for group, name in distributed_c10d._world.pg_names.items()
    }
    entered = (entry for entry in trace["entries"] if entry["time_created_ns"] >= since * 1e9)
    known = [entry for entry in entered if entry["process_group"][0] in groups]
    return trace | {"pg_config": groups, "entries": known}


def counts() -> dict[str, int]:
    """Return how many operations were entered in each group. It is cheap enough for a call every second."""
    dump = _dumper()
    if dump is None:
        return {}
    status = pickle.loads(dump(includeCollectives=False, includeStackTraces=False, onlyActive=False)).get("pg_status")
    return {str(group): int(each["last_enqueued_collective"]) for group, each in (status or {}).items()}


def collectives(trace: Trace) -> list[Collective]:
    """Return one collective of each group: the first that is not complete, or else the last one."""
    shown: dict[str, Collective] = {}
    newest: dict[str, int] = {}
    for entry in trace["entries"]:
        found = _collective(entry, trace["pg_config"])
        if found.group not in shown or shown[found.group].over:
            shown[found.group] = found
        newest[found.group] = max(newest.get(found.group, 0), found.newest)
    return [replace(each, newest=newest[group]) for group, each in shown.items()]


def _collective(entry: dict[str, Any], groups: dict[str, dict[str, str]]) -> Collective:
    group = entry["process_group"][0]
    frames = [(frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", ())]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    return Collective(
        group=group,
        ranks=() if entry["is_p2p"] else tuple(json.loads(groups[group]["ranks"])),
        number=number,
        newest=0 if entry["is_p2p"] else number,
        operation=entry["profiling_name"].rpartition(":")[2],
        size_bytes=sum(
            math.prod(sizes) * _SIZES.get(dtype, 1)
            for sizes, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
        ),
        entered_at=entry["time_created_ns"] / 1e9,
        # gloo never reports `completed`. NCCL's watchdog retires an entry a little after it has seen it complete.
        over=entry["retired"] or entry["state"] == "completed",
        place=own_place(frames),
    )


def _dumper() -> Callable[..., bytes] | None:
    nccl = dist.is_initialized() and "nccl" in dist.get_backend()
    return getattr(c10d, "_dump_nccl_trace" if nccl else "_dump_fr_trace", None)


def _readable(size_bytes: int) -> str:
    size, unit = float(size_bytes), "B"
    for larger in ("KB", "MB", "GB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
