from __future__ import annotations

import pytest

from azureml_strategy.network.nccl_log.evidence import Evidence
from azureml_strategy.network.nccl_log.reader import Messages

TORCH = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:93, unhandled system error, NCCL version 2.27.3"
)


def gather(*lines: str) -> Evidence:
    evidence = Evidence()
    messages = Messages(evidence)
    messages.read(list(lines))
    messages.close()
    return evidence


def info(*texts: str) -> Evidence:
    return gather(*(f"node-0:1:2 [0] NCCL INFO {text}" for text in texts))


@pytest.mark.parametrize(
    ("line", "library", "version"),
    [
        ("NCCL version 2.12.10+cuda11.6", "nccl", "2.12.10"),
        ("node-0:1:2 [0] NCCL INFO NCCL version 2.28.9+cuda13.0", "nccl", "2.28.9"),
        ("[1,0]<stdout>:NCCL version 2.4.8+cuda10.0", "nccl", "2.4.8"),
        ("RCCL version 2.20.5+hip6.2 HEAD:d380693+", "rccl", "2.20.5"),
        ("RCCL version : 2.22.3-HEAD:7d8d67c", "rccl", "2.22.3"),
        ("node-0:1:2 [0] NCCL INFO RCCL version : 2.26.6-HEAD:f224e2c", "rccl", "2.26.6"),
        (TORCH, "nccl", "2.27.3"),
        ("NCCL version: (2, 27, 5)", "nccl", None),
    ],
)
def test_versions(line: str, library: str, version: str | None) -> None:
    evidence = gather(line)
    assert (evidence.library, evidence.version) == (library, version)


@pytest.mark.parametrize(
    ("text", "interfaces", "bootstrap"),
    [
        ("Bootstrap : Using eth0:10.0.0.6<0>", ["eth0"], ["eth0"]),
        ("Bootstrap: Using eth0:10.0.0.6<0>", ["eth0"], ["eth0"]),
        ("Bootstrap : Using [0]eth0:10.221.0.5<0> [1]eth1:fe80::215%eth1<0>", ["eth0"], ["eth0"]),
        ("Bootstrap : Using bond0.3061:10.0.0.6<0>", ["bond0.3061"], ["bond0.3061"]),
        ("NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:172.16.1.4<0>", ["ib0"], ["ib0"]),
        ("NET/Socket : Using [0]eth0:10.0.0.4<0> [1]enP7:fe80::20%enP7<0>", ["eth0", "enP7"], []),
        ("NET/Socket : Using [0]bond0 [1]hsn0", ["bond0", "hsn0"], []),
        ("NET/FastSocket : Using [0]ibs108:10.0.19.12<0>", ["ibs108"], []),
    ],
)
def test_interfaces(text: str, interfaces: list[str], bootstrap: list[str]) -> None:
    evidence = info(text)
    assert list(evidence.interfaces) == interfaces
    assert list(evidence.bootstrap) == bootstrap


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("Using network IB", "IB"),
        ("Using network IBext_v8", "IBext_v8"),
        ("Using network AWS Libfabric", "AWS Libfabric"),
        ("Using network NCCL RDMA Plugin v10", "NCCL RDMA Plugin v10"),
        ("Assigned NET plugin IB to comm", "IB"),
        ("Using network Socket          | 0/100 [00:00<?, ?it/s]", "Socket"),
    ],
)
def test_selected_networks(text: str, network: str) -> None:
    assert list(info(text).selected) == [("node-0", network)]


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.6<0>", "IB"),
        ("NET/Socket : Using [0]eth0:10.0.0.4<0>", "Socket"),
        ("Initialized NET plugin IB", "IB"),
        ("NET/OFI Selected Provider is efa (found 4 nics)", "OFI"),
        ("NET/IB : GPU Direct RDMA Disabled for HCA 1 'mlx5_1' (no module)", "IB"),
    ],
)
def test_networks_found_at_start(text: str, network: str) -> None:
    evidence = info(text)
    assert list(evidence.loaded) == [network]
    assert not evidence.selected


def test_no_adapter_is_no_network() -> None:
    evidence = info("NET/IB : No device found.", "NET/IB : Using ; OOB eth0:10.0.0.4<0>")
    assert evidence.without_device == "NET/IB : No device found."
    assert not evidence.loaded
    assert list(evidence.interfaces) == ["eth0"]


@pytest.mark.parametrize(
    ("text", "level", "enabled"),
    [
        ("NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'", "HCA", True),
        ("NET/IB : GPU Direct RDMA (DMABUF) enabled for HCA 0 'mlx5_0'", "HCA", True),
        ("NET/IB : GPU Direct RDMA (nvidia-peermem) enabled for HCA 0 'mlx5_0", "HCA", True),
        ("NET/NCCL RDMA Plugin v10 : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'", "HCA", False),
        ("GPU Direct RDMA Disabled for GPU 81000 / HCA 1 (distance 6 > 4)", "GPU", False),
        ("NET/IB : GPU Direct RDMA Enabled for GPU 0[81000] / HCA 1 (distance 2 < 3), read 0", "GPU", True),
    ],
)
def test_gpudirect(text: str, level: str, enabled: bool) -> None:
    evidence = info(text)
    assert evidence.gpudirect == {level: {enabled}}
    assert not evidence.without_module


def test_gpudirect_of_sockets_says_nothing_of_adapters() -> None:
    evidence = info("NET/Socket : GPU Direct RDMA Disabled for HCA 0 'ibp24s0'")
    assert not evidence.gpudirect
    assert not evidence.devices.links


def test_devices_named_elsewhere() -> None:
    evidence = info(
        "SHARP rank 0/4 initialized on mlx5_4:1",
        "Sharp rank 1/4 initialized on mlx5_5:1",
        "NET/IB : Made virtual device [2] name=mlx5_6+mlx5_7 speed=400000 ndevs=2",
        "NET/IB: [3] mlx5_8:uverbs8:1/RoCE provider=Mlx5 speed=400000 context=0x1",
    )
    assert evidence.devices.links == {
        "mlx5_4": "IB",
        "mlx5_5": "IB",
        "mlx5_6": None,
        "mlx5_7": None,
        "mlx5_8": "RoCE",
    }


def test_communicators() -> None:
    evidence = info(
        "comm 0x1 rank 0 nranks 8 cudaDev 0 busId 100000 - Init COMPLETE",
        "comm 0x2 rank 3 nRanks 16 nNodes 2 localRanks 8 localRank 3 MNNVL 0",
    )
    assert (evidence.ranks, evidence.nodes, evidence.nvlink_between_nodes) == (16, 2, False)
    assert info("comm 0x2 rank 3 nRanks 72 nNodes 18 localRanks 4 localRank 3 MNNVL 1").nvlink_between_nodes


def test_settings_that_choose_a_network() -> None:
    evidence = info("NCCL_IB_DISABLE set by environment to 1.", "NCCL_MIN_CTAS set by environment to 32.")
    assert evidence.settings == {"NCCL_IB_DISABLE": "1"}


def test_the_last_error_that_torch_passes_on() -> None:
    evidence = gather(
        f"[rank0]: {TORCH}",
        "[rank0]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
        "[rank0]: Last error:",
        "[rank0]: NET/IB: Got completion from peer 10.0.0.5<51> with status=12 opcode=0 len=0 vendor err 129 (Recv)",
        "[rank0]: epoch 3",
    )
    assert [error.name for error in evidence.errors] == ["unhandled", "unhandled", "completion 12"]
    assert evidence.failed == "IB"


def test_warnings_that_nobody_knows_are_kept() -> None:
    (error,) = gather("node-0:1:2 [0] x.cc:1 NCCL WARN Flux capacitor discharged").errors
    assert (error.name, error.text) == ("unknown", "Flux capacitor discharged")


@pytest.mark.parametrize(
    "text", ["Failed to open libibverbs.so[.1]", "Call to connect returned Connection refused, retrying"]
)
def test_failures_that_nccl_only_mentions(text: str) -> None:
    assert [str(error) for error in info(text).errors] == [text]


def test_ordinary_lines_about_nccl_are_no_errors() -> None:
    evidence = gather("pip install nvidia-nccl-cu12==2.27.3", "NCCL_DEBUG=INFO", "backend: nccl, 2 ranks")
    assert not list(evidence.errors)
