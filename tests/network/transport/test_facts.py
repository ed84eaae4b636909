from __future__ import annotations

import pytest

from azureml_strategy.network.transport import Transport, read_transport

IB = "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0"
FOUND = "NET/IB : Using [0]mlx5_ib0:1/IB/SHARP {}; OOB eth0:10.0.0.4<0>"


def read(*texts: str) -> Transport:
    return read_transport(f"node-0:1:2 [0] NCCL INFO {text}" for text in texts)


@pytest.mark.parametrize(
    ("texts", "gpudirect"),
    [
        ([IB, f"{IB}/GDRDMA"], True),
        ([f"{IB}/GDRDMA(PCI)"], True),
        ([IB, "NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'"], False),
        (["Using network Socket"], False),
        (["NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0' (no module)"], False),
        (["NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'"], None),
        (
            [
                "NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'",
                "GPU Direct RDMA Disabled for GPU 1 / HCA 0 (distance 6 > 4)",
            ],
            False,
        ),
        (["Using network IB"], None),
    ],
)
def test_gpudirect(texts: list[str], gpudirect: bool | None) -> None:
    assert read(*texts).gpudirect is gpudirect


@pytest.mark.parametrize(
    ("texts", "sharp"),
    [
        (["Using network IB"], None),
        ([FOUND.format("[RO]")], "available"),
        (["CollNet 05/0 : 5 [receive] via COLLNET/SHARP/5/GDRDMA"], "used"),
    ],
)
def test_sharp(texts: list[str], sharp: str | None) -> None:
    assert read(*texts).sharp == sharp


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["NCCL version 2.18.6+cuda12.1", FOUND.format("[RO]"), "Using network IB"], True),
        (["NCCL version 2.18.6+cuda12.1", FOUND.format(""), "Using network IB"], False),
        (["NCCL version 2.11.4+cuda11.4", FOUND.format(""), "Using network IB"], None),
        (["NCCL version 2.18.6+cuda12.1", FOUND.format(""), "Using network IBext"], None),
        (["NCCL version 2.18.6+cuda12.1", "Using network IB"], None),
    ],
)
def test_relaxed_ordering(texts: list[str], expected: bool | None) -> None:
    assert read(*texts).relaxed_ordering is expected


@pytest.mark.parametrize(
    ("texts", "plugin"),
    [
        (["Using network IBext", IB], "IB"),
        (["Using network IBext"], "IBext"),
        (["Using network IB", "Channel 00/0 : 0[0] -> 1[1] via P2P/IPC"], "IB"),
        (["CollNet 05/0 : 5 [receive] via COLLNET/SHARP/5"], None),
    ],
)
def test_plugin(texts: list[str], plugin: str | None) -> None:
    assert read(*texts).plugin == plugin


def test_proxies_and_ways_inside_the_node() -> None:
    local = "Channel 00/0 : 0[0] -> 1[1] via"
    transport = read(f"{IB}(5)/GDRDMA", f"{local} P2P/CUMEM", f"{local} P2P/CUMEM", f"{local} SHM/direct/direct")
    assert transport.pxn
    assert transport.intra_node == "P2P/CUMEM"
    assert (transport.network_channels, transport.local_channels) == (1, 3)
