"""Pinned memory: pages are registered with CUDA while they are used, and no more of them than are needed."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from azureml_strategy.checkpoint.host_copy import HostCopyBuffer


class Cudart:
    """In place of CUDA's runtime: records which pages are registered.

    Args:
        refuses: registers nothing, as under a limit of locked memory.
    """

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.pages: dict[int, int] = {}
        self.registered = 0
        self.largest = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert address % mmap.PAGESIZE == 0
        assert flags == 1, "for all GPUs"
        if self.refuses:
            return 2
        self.registered += 1
        self.pages[address] = size
        self.largest = max(self.largest, sum(self.pages.values()))
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        ctypes.string_at(address, self.pages.pop(address))  # ends the process if the memory is freed already
        return 0

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802
        return f"error {status}"

    def install(self) -> None:
        """Have torch say that there is a GPU. Its own allocator has no CUDA here."""
        torch.cuda.is_available = lambda: True
        torch.cuda.cudart = lambda: self
        torch.cuda.current_device = lambda: 0
        torch.cuda.device = _device  # type: ignore[assignment, misc]


def _device(_: int) -> AbstractContextManager[None]:
    return nullcontext()


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    for name in ("is_available", "cudart", "current_device", "device"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    runtime = Cudart()
    runtime.install()
    return runtime


def state(size: int) -> dict[str, Any]:
    return {"weights": torch.ones(size, dtype=torch.uint8), "step": 3}


def test_no_more_is_pinned_than_the_state_and_a_page(cudart: Cudart) -> None:
    size = (1 << 20) + 1  # torch's allocator would pin two MiB
    found = HostCopyBuffer().copy(state(size)).content()
    assert size <= cudart.largest < size + 2 * mmap.PAGESIZE
    address = found["weights"].data_ptr()
    assert any(start <= address < start + length for start, length in cudart.pages.items())


def test_pages_are_released_as_the_copy_grows_and_at_its_end(cudart: Cudart) -> None:
    buffer = HostCopyBuffer()
    for size in (50_000, 90_000, 20_000):  # a smaller one takes the same pages
        assert buffer.copy(state(size)).content()["weights"].sum() == size
    assert cudart.registered == 2
    assert cudart.largest < 90_000 + 2 * mmap.PAGESIZE, "never both at once"
    last = buffer.copy(state(1000))
    del buffer
    gc.collect()
    assert cudart.pages, "the last copy lies in them"
    assert last.content()["weights"].sum() == 1000
    del last
    gc.collect()
    assert not cudart.pages


def test_pages_are_released_after_an_exception(cudart: Cudart) -> None:
    def fail() -> None:
        buffer = HostCopyBuffer()
        buffer.copy(state(50_000))
        buffer.copy({"hook": lambda: None})

    with pytest.raises((AttributeError, TypeError)):
        fail()
    gc.collect()
    assert cudart.registered == 1
    assert not cudart.pages


def test_a_gpu_that_still_writes_is_waited_for(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Event:
        def synchronize(self) -> None:
            told.append(f"waited with {len(cudart.pages)} registered")

    monkeypatch.setattr("azureml_strategy.checkpoint.host_copy._events", lambda _: [Event()])
    buffer = HostCopyBuffer()
    buffer.copy(state(50_000))
    assert not told
    buffer.copy(state(90_000))
    assert told == ["waited with 1 registered"] * 2, "before its memory is used again, and before it is released"
    del buffer
    gc.collect()
    assert told == ["waited with 1 registered"] * 3


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cudart.refuses = True
    kernels: list[Any] = []

    def ones(*_: Any, **named: Any) -> None:
        kernels.append(named["device"])
        raise RuntimeError("CUDA error: out of memory")  # as torch says of the error before

    monkeypatch.setattr(torch, "ones", ones)
    with caplog.at_level(logging.WARNING):
        taken = HostCopyBuffer().copy({"weights": torch.zeros(50_000)})
    assert taken.content()["weights"].sum() == 0
    assert kernels == ["cuda"], "the next kernel of the training must not fail"
    assert [each.getMessage().partition(",")[0] for each in caplog.records] == ["CUDA cannot pin 200"]
    assert "error 2" in caplog.text
    assert "ulimit -l" in caplog.text
    del taken
    gc.collect()
    assert not cudart.pages


def test_a_forked_child_releases_nothing(cudart: Cudart) -> None:
    buffer = HostCopyBuffer()
    buffer.copy(state(50_000))
    child = os.fork()
    if child == 0:
        del buffer
        gc.collect()
        os._exit(len(cudart.pages))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1, "the pages are the parent's"


def test_pages_are_released_at_the_end_of_the_process() -> None:
    script = """
import atexit
atexit.register(lambda: print(len(runtime.pages), "left"))  # the first to be registered is called last
from test_pinned_memory import Cudart, state
from azureml_strategy.checkpoint.host_copy import HostCopyBuffer
runtime = Cudart()
runtime.install()
buffer = HostCopyBuffer()
buffer.copy(state(50_000))
print(len(runtime.pages), "registered")
"""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    run = [sys.executable, "-c", script]
    found = subprocess.run(run, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True)
    assert found.stdout.split("\n")[:2] == ["1 registered", "0 left"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: CUDA itself pins the pages here")
def test_torch_takes_registered_pages_for_pinned_memory_and_its_own_allocator_pins_none() -> None:
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    buffer = HostCopyBuffer()
    weights = torch.arange(3_000_000.0, device="cuda")
    found = buffer.copy({"weights": weights}).content()["weights"]
    assert found.is_pinned()
    assert torch.equal(found, torch.arange(3_000_000.0))
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == before
