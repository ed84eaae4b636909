"""Exchanges on a GPU, whose streams and collectives are stand-ins that note their order; tensors are on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from azureml_strategy.strategies.local_sgd.exchange import Exchanges, RanksApartError

GROUP: Any = "the group of the exchanges"


class Stream:
    """Notes what it is given to do."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def record_event(self) -> str:
        self._log.append(f"event of {self.name}")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self.name} waits for {event}")

    def wait_stream(self, stream: Stream) -> None:
        self._log.append(f"{self.name} waits for {stream.name}")


class Machine:
    """A GPU and a group of two ranks, of which the other one is `apart` steps ahead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
        self.log: list[str] = []
        self.threads: set[int] = set()
        self.apart = 0
        self._current = self._main = Stream("main", self.log)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", self.log))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self._current)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
        monkeypatch.setattr(dist, "get_backend", lambda group: backend)
        monkeypatch.setattr(dist, "all_gather", self._all_gather)
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)
        self.exchanges = Exchanges(GROUP, torch.device("cuda", 0))
        self.exchanges.device = torch.device("cpu")  # of the tensors

    def begin(self, step: int = 1) -> Callable[[], Tensor]:
        mean: Callable[[Tensor], Tensor] = self.exchanges.mean
        return self.exchanges.begin((step,), "step {0}", torch.ones(3), mean)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        self._current, former = stream, self._current
        yield
        self._current = former

    def _all_gather(self, places: list[Tensor], own: Tensor, group: Any) -> None:
        self._note("gather")
        places[0].copy_(own)
        places[1].copy_(own + self.apart)

    def _all_reduce(self, tensor: Tensor, group: Any) -> None:
        self._note("reduce")
        tensor.mul_(2)

    def _note(self, collective: str) -> None:
        self.threads.add(threading.get_ident())
        self.log.append(f"{collective} on {self._current.name}")


def test_the_training_thread_alone_launches_nccls_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which it comes to them, which is that of all ranks; two threads have no common order."""
    machine = Machine(monkeypatch, "nccl")
    exchange = machine.begin()
    machine.log.append("training goes on")
    assert machine.exchanges.wait(exchange).tolist() == [1, 1, 1]
    assert machine.log == [
        *("event of main", "side waits for event of main", "gather on side", "reduce on side", "event of side"),
        *("training goes on", "main waits for event of side"),
    ]
    assert machine.threads == {threading.get_ident()}
    assert machine.exchanges.close(0)
    assert "local-sgd-exchange" not in [thread.name for thread in threading.enumerate()]


def test_ranks_that_came_from_different_places_are_found_at_the_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, "nccl")
    machine.apart = 4
    exchange = machine.begin(step=8)
    with pytest.raises(RanksApartError, match="rank 0: step 8; rank 1: step 12"):
        machine.exchanges.wait(exchange)


def test_gloo_has_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its collectives hold up their caller, and know no order of groups."""
    machine = Machine(monkeypatch, "gloo")
    assert machine.exchanges.wait(machine.begin()).tolist() == [1, 1, 1]
    assert threading.get_ident() not in machine.threads
    assert "main waits for side" in machine.log
    assert machine.exchanges.close(60)
