from __future__ import annotations

import pytest

from azureml_strategy.network.transport import LogError, read_transport

SOCKETS = ["NET/Socket : Using [0]eth0:10.0.0.4<0>", "Using network Socket"]
IB_FOUND = "NET/IB : Using [0]mlx5_ib0:1/IB [1]mlx5_an0:1/RoCE [RO]; OOB eth0:10.0.0.4<0>"
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
        ([NO_MODULE, "Using network IB"], "no GPUDirect module", "warning", "DMA-BUF"),
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
