from __future__ import annotations

import pytest

from azureml_strategy.network.nccl_log import LogError, Transport, describe, read_transport


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        ([], "unknown transport: the log has no line that shows it; run with NCCL_DEBUG=INFO"),
        (
            [
                "NET/IB : Using [0]mlx5_ib0:1/IB [1]mlx5_ib1:1/IB [RO]; OOB eth0:10.0.0.4<0>",
                "CollNet 05/0 : 5 [receive] via COLLNET/SHARP/1/GDRDMA",
            ],
            "InfiniBand, 2 HCAs (mlx5_ib0, mlx5_ib1), GPUDirect RDMA, SHARP",
        ),
        (["Using network Socket"], "TCP sockets, no channel seen yet"),
        (["Using network IB"], "InfiniBand, no channel seen yet"),
        (["Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct"], "inside nodes only, SHM/direct/direct"),
    ],
)
def test_line(texts: list[str], line: str) -> None:
    assert describe(read_transport(f"node-0:1:2 [0] NCCL INFO {text}" for text in texts)) == line


IB_FOUND = "NET/IB : Using [0]mlx5_ib0:1/IB [1]mlx5_an0:1/RoCE [RO]; OOB eth0:10.0.0.4<0>"
ROCE_FOUND = "NET/IB : Using [0]mlx5_an0:1/RoCE [RO]; OOB eth0:10.0.0.4<0>"
SOCKET_FOUND = "NET/Socket : Using [0]eth0:10.0.0.4<0>"
LOCAL = "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read"


def over(route: str, channel: str = "Channel 00/0 : 0[0] -> 8[0] [send]") -> str:
    return f"{channel} via {route}"


def read(*texts: str, host: str = "node-0") -> Transport:
    return read_transport(f"{host}:1:2 [0] NCCL INFO {text}" for text in texts)


@pytest.mark.parametrize(
    ("texts", "kind", "evidence"),
    [
        ([over("NET/IB/0/GDRDMA")], "ib", "channels"),
        ([over("NET/IB/0", "Ring 00 : 0 -> 1 [send]")], "ib", "channels"),
        ([over("NET/IB/0", "Channel 00 : 0[1a000] -> 1[1a000] [receive]")], "ib", "channels"),
        ([over("NET/IBext_v8/3(5)/GDRDMA/Shared")], "ib", "channels"),
        ([over("NET/NCCL RDMA Plugin v8/1/GDRDMA")], "ib", "channels"),
        ([over("COLLNET/SHARP/0/GDRDMA", "CollNet 00/0 : 0 [send]")], "ib", "collnet"),
        ([over("COLLNET/SHARP/0", "Coll 00 : 0 [send]")], "ib", "collnet"),
        ([over("COLLNET/SHARP/0", "CollNet 00 : 0 [send]"), over("NET/IB/0")], "ib", "channels"),
        ([over("NET/Socket/0", "Ring 00 : 0 -> 1 [send]")], "socket", "channels"),
        ([over("NET/AWS Libfabric/0")], "ofi", "channels"),
        ([over("NET/Libfabric/0/GDRDMA")], "ofi", "channels"),
        ([IB_FOUND, over("NET/IB/0/GDRDMA")], "ib", "channels"),
        ([IB_FOUND, over("NET/IB/1/GDRDMA")], "roce", "channels"),
        ([ROCE_FOUND, over("NET/UCX/0")], "roce", "channels"),
        ([ROCE_FOUND, over("NET/Plugin of mine/0")], "roce", "channels"),
        ([over("NET/FasTrak/0")], "unknown", "channels"),
        ([IB_FOUND, "Using network IB", over("NET/Socket/0")], "socket", "channels"),
        ([IB_FOUND, "Using network IB", LOCAL], "p2p-only", "channels"),
        ([over("SHM/direct/direct")], "p2p-only", "channels"),
        (["Connected NVLS tree", over("P2P/direct pointer")], "p2p-only", "channels"),
        ([over("direct shared memory", "Ring 00 : 0[0] -> 1[1]")], "p2p-only", "channels"),
        ([IB_FOUND, "Using network IB"], "ib", "init"),
        ([ROCE_FOUND, "Using network IB"], "roce", "init"),
        (["NET/IB : No device found.", SOCKET_FOUND, "Using network Socket"], "socket", "init"),
        (["NET/IB : No device found.", "Assigned NET plugin Libfabric to comm"], "ofi", "init"),
        (["NET/IB : No device found.", IB_FOUND, "Using network IBext"], "ib", "init"),
        ([SOCKET_FOUND, IB_FOUND], "ib", "init"),
        (["NET/IB : No device found.", SOCKET_FOUND], "socket", "init"),
        ([IB_FOUND, "comm 0x1 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0", LOCAL], "ib", "init"),
        (["comm 0x1 rank 0 nRanks 8 nNodes 2 localRanks 4 localRank 0 MNNVL 1", LOCAL], "p2p-only", "channels"),
        ([IB_FOUND, "comm 0x1 nRanks 8 nNodes 2", over("P2P/MNNVL")], "p2p-only", "channels"),
        (["comm 0x1 nRanks 8 nNodes 2", LOCAL], "p2p-only", "channels"),
        (["Channel 00/24 :    0   1   2   3"], "unknown", "none"),
        ([], "unknown", "none"),
    ],
)
def test_kind(texts: list[str], kind: str, evidence: str) -> None:
    transport = read(*texts)
    assert (transport.kind, transport.evidence) == (kind, evidence)


def test_one_rank_that_fell_back_decides() -> None:
    log = [f"node-{node}:1:2 [0] NCCL INFO {over('NET/IB/0/GDRDMA')}" for node in range(3)]
    log.append(f"node-3:1:2 [0] NCCL INFO {over('NET/Socket/0')}")
    transport = read_transport(log)
    assert transport.kind == "socket"
    assert transport.gpudirect
    (finding,) = transport.findings
    assert finding.severity == "problem"
    assert finding.text == "IB (ib) on node-0, node-1, node-2; Socket (socket) on node-3"


def test_ranks_without_a_prefix_may_differ_too() -> None:
    transport = read_transport([f"NCCL INFO {over(route)}" for route in ("NET/IB/0", "NET/Socket/0")])
    assert transport.kind == "socket"
    assert "mixed transports" in {finding.name for finding in transport.findings}


def test_several_hosts_with_local_channels_only_are_judged_by_what_they_selected() -> None:
    log = [
        f"node-{node}:1:2 [0] NCCL INFO {text}" for node in range(2) for text in (IB_FOUND, "Using network IB", LOCAL)
    ]
    assert read_transport(log).kind == "ib"


@pytest.mark.parametrize(
    ("warning", "kind", "evidence"),
    [
        ("Bootstrap : no socket interface found", "p2p-only", "error"),
        ("NET/IB : Got completion from peer 10.0.0.5<1> with error 12, opcode 0, len 0, vendor err 129", "ib", "error"),
        ("NET/IB: Got completion with status=12 opcode=0 vendor err 129 localGid ::ffff:10.0.0.4", "roce", "error"),
        ("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 53000", "unknown", "none"),
    ],
)
def test_errors_alone(warning: str, kind: str, evidence: str) -> None:
    transport = read_transport(f"node-0:1:2 [0] x.cc:1 NCCL WARN {warning}")
    assert (transport.kind, transport.evidence) == (kind, evidence)


SOCKETS = ["NET/Socket : Using [0]eth0:10.0.0.4<0>", "Using network Socket"]
NO_MODULE = "NET/IB : GPU Direct RDMA Disabled for HCA 1 'mlx5_1' (no module)"


def findings(*texts: str, hosts: int = 1) -> list[LogError]:
    log = [f"node-{host}:1:2 [0] NCCL INFO {text}" for host in range(hosts) for text in texts]
    return list(read_transport(log).findings)


@pytest.mark.parametrize(
    ("texts", "name", "severity", "fix"),
    [
        ([IB_FOUND, *SOCKETS], "InfiniBand unused", "problem", "NCCL_NET and NCCL_IB_DISABLE"),
        ([IB_FOUND, "NCCL_NET set by environment to Socket.", *SOCKETS], "InfiniBand unused", "problem", "NET=Socket,"),
        (["NET/Socket : Using [0]ib0:172.16.0.4<0>"], "IPoIB", "warning", "NCCL_SOCKET_IFNAME=eth0"),
        (["NET/IB : Using [0]mlx5_an0:1/RoCE [RO]; OOB eth0:1<0>"], "RoCE", "warning", "NCCL_IB_DISABLE=1"),
        (
            [IB_FOUND, "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/1/GDRDMA"],
            "RoCE",
            "warning",
            "NCCL_IB_HCA==mlx5_ib0:1,",
        ),
        ([NO_MODULE, "Using network IB"], "no GPUDirect module", "warning", "NCCL 2.13 or newer"),
        (["Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/1"], "GPUDirect unused", "warning", "NCCL_TOPO_FILE"),
    ],
)
def test_finding(texts: list[str], name: str, severity: str, fix: str) -> None:
    (finding,) = findings(*texts)
    assert (finding.name, finding.severity) == (name, severity)
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("texts", "unset"),
    [([], "NCCL_IB_DISABLE and NCCL_IB_HCA,"), (["NCCL_IB_DISABLE set by environment to 1."], "NCCL_IB_DISABLE=1,")],
)
def test_a_fallback_to_sockets_is_an_error(texts: list[str], unset: str) -> None:
    log = [f"node-0:1:2 [0] NCCL INFO {text}" for text in ["NET/IB : No device found.", *texts, *SOCKETS]]
    (error,) = read_transport(log).errors
    assert (error.name, error.severity, str(error)) == ("no device", "warning", "NET/IB : No device found.")
    assert f"unset {unset}" in error.fix


def test_a_network_that_works_after_the_built_in_one_found_nothing_is_no_fallback() -> None:
    log = [
        "NET/IB : No device found.",
        IB_FOUND,
        "Using network IBext",
        "Channel 00 : 0 -> 8 [send] via NET/IBext/0/GDRDMA",
    ]
    assert read_transport(f"node-0:1:2 [0] NCCL INFO {text}" for text in log).errors == ()


def test_azures_virtual_function_beside_eth0_is_found() -> None:
    used = "NET/Socket : Using [0]eth0:10.60.0.5<0> [1]enP7906s1:fe80::20d:3aff:fef9:4aef%enP7906s1<0>"
    (finding,) = findings(used, "Using network Socket")
    assert (finding.name, finding.text) == ("virtual function", "Sockets over enP7906s1 beside eth0")
    assert "NCCL_SOCKET_IFNAME=eth0" in finding.fix
    assert findings("NET/Socket : Using [0]enP7906s1:10.60.0.5<0>", "Using network Socket") == []


@pytest.mark.parametrize("interface", ["lo", "docker0", "virbr0", "br-eaee979aadb0"])
def test_a_bootstrap_that_other_nodes_cannot_reach(interface: str) -> None:
    bootstrap = f"Bootstrap : Using {interface}:127.0.0.1<0>"
    assert findings(bootstrap) == []
    (finding,) = findings(bootstrap, hosts=2)
    assert (finding.name, finding.text) == ("wrong interface", f"Bootstrap over {interface}")


@pytest.mark.parametrize(
    "texts",
    [
        [IB_FOUND, "Using network IB", "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA"],
        ["NET/IB : No device found.", IB_FOUND, "Using network IBext"],
        SOCKETS,
        ["Bootstrap : Using eth0:10.0.0.4<0>", "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"],
        ["NET/Socket : Using [0]eth0:10.0.0.4<0>", IB_FOUND],
    ],
)
def test_nothing_to_find(texts: list[str]) -> None:
    assert findings(*texts, hosts=2) == []


def test_many_hosts_are_not_all_named() -> None:
    log = [f"node-{node:02}:1:2 [0] NCCL INFO Using network {'IB' if node else 'Socket'}" for node in range(20)]
    (finding,) = read_transport(log).findings
    assert finding.text.startswith("Socket (socket) on node-00; IB (ib) on node-01, node-02,")
    assert finding.text.endswith("node-08 and 11 more")
