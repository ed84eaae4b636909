"""Nodes are threads here, round one store; what NCCL would write is written for it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.network import session
from azureml_strategy.network.nccl import NetworkPlan, Setting
from azureml_strategy.network.node import Node, read_node
from azureml_strategy.network.record import RunNetwork
from azureml_strategy.network.session import NetworkSession, prepare_network

INFINIBAND = """\
NCCL version 2.21.5+cuda12.4
node:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_ib0:1/IB [1]mlx5_ib1:1/IB [RO]; OOB eth0:10.0.0.4<0>
node:1:2 [0] NCCL INFO Using network IB
node:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
"""
SOCKETS = """\
NCCL version 2.21.5+cuda12.4
node:1:2 [0] NCCL INFO NET/IB : No device found.
node:1:2 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0>
node:1:2 [0] NCCL INFO Using network Socket
node:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [send] via NET/Socket/0
"""


def launch(node_rank: int, nodes: int = 2, address: str = "127.0.0.1") -> Launch:
    return Launch("pytorch", node_rank, nodes, 0, 1, node_rank, nodes, address, 6105)


def with_log(tmp_path: Path, node_rank: int, text: str | None, level: str = "INFO") -> NetworkPlan:
    """A plan that is applied, and whose log NCCL has written."""
    path = tmp_path / f"{node_rank}.log"
    if text is not None:
        path.write_text(text)
    settings = (Setting("NCCL_DEBUG", level, "", ""), Setting("NCCL_DEBUG_FILE", str(path), "", ""))
    return NetworkPlan(settings, (), (), infiniband=True)


def observe(
    tmp_path: Path, logs: Mapping[int, str | None], *, require: bool = False, **plan: Any
) -> dict[int, RunNetwork | LaunchError | None]:
    """What each node gets from `observe`."""
    store, node = HashStore(), dataclasses.replace(read_node(tmp_path, {}), vm_size_name="Standard_X")

    def one(node_rank: int) -> RunNetwork | LaunchError | None:
        applied = with_log(tmp_path, node_rank, logs[node_rank], **plan)
        try:
            return NetworkSession(launch(node_rank, len(logs)), "nccl", node, applied, store, require).observe()
        except LaunchError as error:
            return error

    with ThreadPoolExecutor(len(logs)) as pool:
        return dict(zip(logs, pool.map(one, logs), strict=True))


def network(tmp_path: Path, logs: Mapping[int, str | None], **arguments: Any) -> RunNetwork:
    seen = observe(tmp_path, logs, **arguments)
    assert isinstance(seen[0], RunNetwork)
    assert all(seen[rank] is None for rank in logs if rank)
    return seen[0]


def test_rank_0_gets_the_transport_of_all_nodes(tmp_path: Path) -> None:
    run = network(tmp_path, {0: INFINIBAND, 1: INFINIBAND})
    assert run.line == "Network: nccl over InfiniBand, 2 HCAs (mlx5_ib0, mlx5_ib1), GPUDirect RDMA"
    assert run.warnings == []
    assert run.tags == {
        "network.backend": "nccl",
        "network.transport": "ib",
        "network.hcas": "mlx5_ib0,mlx5_ib1",
        "network.gpudirect": "yes",
        "network.vm_size": "Standard_X",
    }
    artifact = json.loads(run.to_json())
    assert [node["node_rank"] for node in artifact["nodes"]] == [0, 1]
    assert artifact["nodes"][0]["settings"][0]["variable"] == "NCCL_DEBUG"


def test_one_node_on_sockets_is_what_the_job_gets(tmp_path: Path) -> None:
    run = network(tmp_path, {0: INFINIBAND, 1: SOCKETS})
    assert run.kind == "socket"
    assert run.tags["network.gpudirect"] == "no"
    assert run.line.startswith("Network: nccl over TCP sockets, eth0 (on ")
    assert run.line.endswith("1 other node(s): InfiniBand, 2 HCAs (mlx5_ib0, mlx5_ib1), GPUDirect RDMA)")
    assert any("NCCL saw no InfiniBand adapter" in warning for warning in run.warnings)


def test_required_infiniband_stops_every_rank_if_one_node_fell_back(tmp_path: Path) -> None:
    told = observe(tmp_path, {0: INFINIBAND, 1: SOCKETS}, require=True)
    assert all(isinstance(error, LaunchError) for error in told.values())
    assert str(told[0]) == str(told[1])
    assert "require_infiniband=True, but NCCL does not use it on" in str(told[0])
    assert "TCP sockets, eth0." in str(told[0])


def test_required_infiniband_that_is_used_goes_on(tmp_path: Path) -> None:
    told = observe(tmp_path, {0: INFINIBAND, 1: INFINIBAND}, require=True)
    assert isinstance(told[0], RunNetwork)
    assert told[1] is None


@pytest.mark.parametrize(
    ("text", "level", "told"),
    [
        (None, "INFO", "No such file"),
        (INFINIBAND, "WARN", "not known: NCCL_DEBUG=WARN keeps NCCL from telling it. Remove NCCL_DEBUG."),
        ("\0\xff\n" * 100, "INFO", "unknown transport: the log has no line that shows it"),
    ],
)
def test_a_log_that_tells_nothing_does_not_stop_the_run(
    tmp_path: Path, text: str | None, level: str, told: str
) -> None:
    run = network(tmp_path, {0: text, 1: text}, level=level)
    assert run.kind == "unknown"
    assert told in run.line


def test_on_one_node_the_way_inside_it_is_told(tmp_path: Path) -> None:
    """NCCL names a network that it would use; with one device there is no channel at all."""
    inside = "node:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"
    run = network(tmp_path, {0: SOCKETS.rpartition("node:")[0] + inside})
    assert run.line == "Network: nccl over P2P/CUMEM/read, inside one node"
    assert run.tags["network.transport"] == "p2p-only"
    assert run.warnings == []
    run = network(tmp_path, {0: SOCKETS.rpartition("node:")[0]})
    assert run.line == "Network: nccl over one device, inside one node"


def test_a_node_that_does_not_report_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_RECORD_TIMEOUT", timedelta(seconds=0.2))
    node, plan = read_node(tmp_path, {}), with_log(tmp_path, 0, INFINIBAND)
    run = NetworkSession(launch(0), "nccl", node, plan, HashStore(), False).observe()
    assert run is not None
    assert len(run.nodes) == 1
    with pytest.raises(LaunchError, match="only 1 of 2 nodes told their transport"):
        NetworkSession(launch(0), "nccl", node, plan, HashStore(), True).observe()


@pytest.mark.parametrize("line", ["NET/IB : No device found.", "Failed to open libibverbs.so[.1]"])
def test_one_node_misses_no_network(tmp_path: Path, line: str) -> None:
    """One process alone has no channel, and NCCL names the sockets that it would use."""
    text = SOCKETS.rpartition("node:")[0] + f"node:1:2 [0] NCCL INFO {line}\n"
    assert network(tmp_path, {0: text}).warnings == []
    (of_both,) = [each for each in network(tmp_path, {0: text, 1: text}).warnings if line in each]
    assert "NCCL saw no InfiniBand adapter" in of_both or "libibverbs" in of_both


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Node:
    """`prepare_network` sees a machine of its own, and changes no variable for longer than the test."""
    node = read_node(tmp_path, {})
    monkeypatch.setattr(session, "read_node", lambda: node)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return node


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def alone(num_nodes: int = 1) -> Launch:
    return Launch("pytorch", 0, 1, 0, 1, 0, 1, "127.0.0.1", free_port())


@pytest.mark.usefixtures("prepared")
def test_a_job_of_one_node_needs_no_infiniband() -> None:
    assert not prepare_network(alone(), "gloo", timedelta(seconds=120), require_infiniband=True).require_infiniband


@pytest.mark.usefixtures("prepared")
def test_nccls_log_is_asked_for_and_the_plan_applied() -> None:
    prepared = prepare_network(alone(), "nccl", timedelta(seconds=120))
    assert os.environ["NCCL_DEBUG"] == "INFO"
    assert os.environ["NCCL_DEBUG_FILE"] == prepared.plan.variables["NCCL_DEBUG_FILE"]
    assert json.loads(os.environ["AZUREML_STRATEGY_PLANNED"]) == prepared.plan.variables


@pytest.mark.parametrize("started", [False, True])
def test_gpus_are_not_numbered_anew_once_cuda_has_started(
    prepared: Node, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    order = Setting("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "", "")
    monkeypatch.setattr(session, "plan_nccl", lambda *_, **__: NetworkPlan((order,), (), (), infiniband=False))
    monkeypatch.setattr(session, "cuda_started", lambda: started)
    monkeypatch.delitem(os.environ, "CUDA_DEVICE_ORDER", raising=False)
    prepare_network(alone(), "nccl", timedelta(seconds=120))
    assert ("CUDA_DEVICE_ORDER" in os.environ) is not started


@pytest.mark.usefixtures("prepared")
def test_gloo_gets_no_setting_of_nccls() -> None:
    prepared = prepare_network(alone(), "gloo", timedelta(seconds=120))
    assert not [name for name in os.environ if name.startswith("NCCL_")]
    assert prepared.plan.variables == {"TORCH_FR_BUFFER_SIZE": "2000"}, "of torch alone"


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"NCCL_DEBUG": "WARN"}, "the transport would be not known: NCCL_DEBUG=WARN"),
        ({}, "this node (Standard_ND96isr_H100_v5) has no InfiniBand to use. InfiniBand: Standard_ND96isr_H100_v5 has"),
    ],
)
def test_what_stands_in_the_way_of_required_infiniband(environ: dict[str, str], told: str) -> None:
    from azureml_strategy.network.nccl import plan_nccl
    from azureml_strategy.network.session import _obstacle

    size = {"AZUREML_RUN_ID": "job", "AZUREML_CR_COMPUTE_CONTEXT": '{"vm_size": "Standard_ND96isr_H100_v5"}'}
    node = read_node("/nonexistent", size)
    plan = plan_nccl(node, num_nodes=2, environ=environ, root="/nonexistent", log_folder=Path("/tmp"))
    if environ:
        plan = dataclasses.replace(plan, infiniband=True)
    assert told in (_obstacle(node, plan, "nccl") or "")
