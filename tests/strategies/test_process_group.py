"""Whose the process group is, how it ends, and how it is made on a GPU. Real groups are of one process, by gloo."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.fabric.utilities import distributed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import HashStore

from azureml_strategy.strategies import (
    AzureMLDDPStrategy,
    AzureMLDeepSpeedStrategy,
    AzureMLLocalSGDStrategy,
    AzureMLModelParallelStrategy,
    process_group,
)
from azureml_strategy.strategies.fabric import FabricDDPStrategy, FabricDeepSpeedStrategy
from azureml_strategy.strategies.process_group import (
    end_process_group,
    end_subgroup,
    note_failure,
    own_process_group,
    owns_process_group,
)

GPU = torch.device("cuda", 1)


def init() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of ours, which the test may leave or end."""
    monkeypatch.delattr(sys, "last_value", raising=False)
    init()
    own_process_group()
    yield
    monkeypatch.undo()
    if dist.is_initialized():
        dist.destroy_process_group()
    atexit.unregister(process_group._end_at_exit)


@pytest.mark.usefixtures("group")
def test_it_is_ended_with_its_subgroups() -> None:
    sub = dist.new_group([0])
    assert sub is not None
    assert owns_process_group()
    end_process_group()
    assert not dist.is_initialized()
    end_process_group()  # there is none any more


@pytest.mark.usefixtures("group")
def test_another_group_is_left_alone() -> None:
    dist.destroy_process_group()
    init()
    end_process_group()
    assert dist.is_initialized(), "the user has made it"


@pytest.mark.usefixtures("group")
def test_a_forked_child_leaves_its_copy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    end_process_group()
    assert dist.is_initialized()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("noted", ["in a fit", "by Python"])
def test_a_rank_that_has_failed_aborts_nccls(monkeypatch: pytest.MonkeyPatch, noted: str) -> None:
    """Destroying them would wait for ranks that are inside a collective."""
    called: list[str] = []
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    monkeypatch.setattr(dist, "destroy_process_group", lambda group=None: called.append("destroyed"))
    monkeypatch.setattr(process_group, "_abort_process_group", lambda: called.append("aborted"))
    if noted == "in a fit":
        AzureMLDDPStrategy().on_exception(ValueError())
    else:
        monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    assert dist.group.WORLD is not None
    end_subgroup(dist.group.WORLD)
    end_process_group()
    assert called == ["aborted"]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("error", [None, SIGTERMException(143), "failed before"])
def test_a_rank_that_has_not_failed_destroys_nccls(monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    """At SIGTERM all ranks stop together; and an error that the script has caught is no end."""
    called: list[str] = []
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    monkeypatch.setattr(dist, "destroy_process_group", lambda group=None: called.append("destroyed"))
    if error == "failed before":
        note_failure(failed=True)
        note_failure(failed=False)
    elif error is not None:
        AzureMLDDPStrategy().on_exception(error)
    end_process_group()
    assert called == ["destroyed"]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("ranks", "failed", "others"), [(2, False, True), (1, False, False), (2, True, False)])
def test_what_never_ends_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ranks: int, failed: bool, others: bool
) -> None:
    """Other ranks are named only where the end waits for some: an abort of NCCL's waits for none, nor does one rank."""
    for limit in ("_END_SECONDS", "_ABORT_SECONDS"):
        monkeypatch.setattr(process_group, limit, 0.1)
    over = threading.Event()
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: ranks)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: over.wait())
    monkeypatch.setattr(process_group, "_abort_process_group", lambda: over.wait())
    note_failure(failed)
    end_process_group()
    over.set()
    assert "could not be destroyed within 0 s" in caplog.text
    assert ("other ranks are still at work" in caplog.text) is others


@pytest.mark.usefixtures("group")
def test_an_error_of_the_end_is_told_and_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("NCCL error")

    monkeypatch.setattr(dist, "destroy_process_group", fail)
    end_process_group()
    assert "could not be destroyed: NCCL error" in caplog.text


@pytest.mark.usefixtures("group")
def test_lightning_does_not_destroy_what_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit handler for NCCL's groups waits for other ranks without a limit."""
    removed: list[Any] = []
    monkeypatch.setattr(atexit, "unregister", removed.append)
    own_process_group()
    assert distributed._destroy_dist_connection in removed


@pytest.mark.parametrize(
    ("strategy", "start"),
    [
        (AzureMLDDPStrategy, "setup_distributed"),
        (AzureMLLocalSGDStrategy, "setup_distributed"),
        (AzureMLModelParallelStrategy, "_setup_distributed"),
        (AzureMLDeepSpeedStrategy, "_init_deepspeed_distributed"),
        (FabricDDPStrategy, "_setup_distributed"),
        (FabricDeepSpeedStrategy, "_init_deepspeed_distributed"),
    ],
)
@pytest.mark.parametrize("backend", [None, "gloo"])
def test_the_group_is_bound_to_the_gpu(
    monkeypatch: pytest.MonkeyPatch, strategy: type[Any], start: str, backend: str | None
) -> None:
    """Else torch warns at each barrier that it takes the current device. DeepSpeed binds no single process."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    calls: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, device_id=None, **_: calls.append((backend, device_id))
    )
    monkeypatch.setattr("deepspeed.init_distributed", lambda *_, **__: None)
    monkeypatch.setattr(strategy, "root_device", GPU)
    monkeypatch.setattr(distributed.atexit, "register", lambda *_: None)
    made = strategy(cluster_environment=LightningEnvironment(), process_group_backend=backend)
    made.num_nodes, made.parallel_devices = 1, [GPU]
    made._local_rank, made.accelerator = 0, SimpleNamespace(setup_device=lambda device: None)
    getattr(made, start)()
    assert calls == [(backend or "nccl", GPU)]


@pytest.mark.parametrize(
    ("strategy", "wrap"), [(AzureMLDDPStrategy, "_setup_model"), (FabricDDPStrategy, "setup_module")]
)
def test_ddp_is_wrapped_on_the_current_stream(monkeypatch: pytest.MonkeyPatch, strategy: Any, wrap: str) -> None:
    """On a stream of its own, torch 2.11 warns in each backward pass that gradients come from another."""

    def another_stream(*_: Any) -> None:
        raise AssertionError("DDP is wrapped on another stream")

    def record(module: torch.nn.Module, **given: Any) -> MagicMock:
        wrapped.append(given)
        return MagicMock()

    wrapped: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Stream", another_stream)
    stock = "DistributedDataParallel"
    for module, name in ((strategy, "CompletingDDP"), (DDPStrategy, stock), (FabricDDP, stock)):
        monkeypatch.setattr(sys.modules[module.__module__], name, record)
    monkeypatch.setattr(strategy, "root_device", GPU)
    getattr(strategy(), wrap)(torch.nn.Linear(1, 1))
    assert wrapped[0]["device_ids"] == [1]
    assert wrapped[0]["gradient_as_bucket_view"] is True
