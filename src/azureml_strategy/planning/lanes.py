"""Simulates a step on two lanes, computation and network: each does its tasks in order, and a task waits for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Lane = Literal["compute", "network"]


@dataclass(frozen=True)
class Task:
    """Something that a lane does in one piece.

    Attributes:
        name: what it is, for a reader of the timeline.
        lane: who does it.
        seconds: what it takes if nothing disturbs it.
        after: numbers of the tasks that must be over before it begins, apart from the one before it in its lane.
    """

    name: str
    lane: Lane
    seconds: float
    after: tuple[int, ...] = ()


@dataclass
class Tasks:
    """A list of tasks that grows; each gets its number."""

    listed: list[Task] = field(default_factory=list)

    def add(self, name: str, lane: Lane, seconds: float, *after: int | None) -> int:
        """Add a task and return its number; None among those that it waits for is nothing to wait for."""
        self.listed.append(Task(name, lane, seconds, tuple(each for each in after if each is not None)))
        return len(self.listed) - 1


@dataclass(frozen=True)
class Timeline:
    """What became of the tasks, in seconds.

    Attributes:
        total_s: until the last task is over.
        compute_s: what computation takes alone.
        network_s: how long the network is busy.
        ends: when each task was over, by its number.
    """

    total_s: float
    compute_s: float
    network_s: float
    ends: tuple[float, ...]

    @property
    def exposed_s(self) -> float:
        """Time that communication adds: waiting, and computation that it slows down."""
        return self.total_s - self.compute_s


def run_lanes(tasks: Sequence[Task], slowdown: float = 0.0) -> Timeline:
    """Run the tasks.

    Args:
        tasks: each lane does its own in this order.
        slowdown: the share by which computation is slower while the network is busy, 0 to below 1. NCCL's kernels take
            multiprocessors and memory bandwidth, and sockets take the host's cores.

    Raises:
        ValueError: tasks wait for one another in a circle.
    """
    ends: list[float | None] = [None] * len(tasks)
    queues: dict[Lane, list[int]] = {"compute": [], "network": []}
    for number in reversed(range(len(tasks))):
        queues[tasks[number].lane].append(number)
    left = [each.seconds for each in tasks]
    now = 0.0
    while queues["compute"] or queues["network"]:
        running = {
            lane: queue[-1]
            for lane, queue in queues.items()
            if queue and all(ends[each] is not None for each in tasks[queue[-1]].after)
        }
        if not running:
            raise ValueError("Each lane's next task waits for one that is not over: the tasks wait in a circle.")
        speed = {"compute": 1.0 - slowdown if "network" in running else 1.0, "network": 1.0}
        passed = min(left[number] / speed[lane] for lane, number in running.items())
        now += passed
        for lane, number in running.items():
            left[number] -= passed * speed[lane]
            if left[number] <= 1e-12:  # seconds; rounding leaves such rests
                ends[number] = now
                queues[lane].pop()
    spent = {lane: sum(each.seconds for each in tasks if each.lane == lane) for lane in queues}
    return Timeline(now, spent["compute"], spent["network"], tuple(each or 0.0 for each in ends))
