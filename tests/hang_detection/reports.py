"""Reports as ranks would write them."""

from __future__ import annotations

from azureml_strategy.hang_detection.flight_recorder import Collective
from azureml_strategy.hang_detection.peers import Heartbeat, Report


def heartbeat(step: int = 7, idle_s: float = 9.0, over: bool = False) -> Heartbeat:
    return Heartbeat(3, 1_700_000_000.0, over, "training", step, idle_s, 600.0, {"0": 40})


def collective(
    number: int,
    over: bool = False,
    group: str = "0",
    ranks: tuple[int, ...] = (0, 1, 2, 3),
    operation: str = "all_reduce",
    size_bytes: int = 3_200_000,
    newest: int | None = None,
) -> Collective:
    entered_at = 1_700_000_000.0 + number
    return Collective(group, ranks, number, operation, size_bytes, entered_at, over, newest or number)


def report(*collectives: Collective, communicates: bool = False, failed: bool = False) -> Report:
    frames = [("/home/me/train.py", 30, "__getitem__")]
    return Report(heartbeat(), list(collectives), frames, "/home/me/train.py:30 in __getitem__", communicates, failed)
