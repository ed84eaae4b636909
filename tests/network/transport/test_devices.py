from __future__ import annotations

import pytest

from azureml_strategy.network.transport.bounded import LIMIT
from azureml_strategy.network.transport.devices import Devices


def read(text: str, host: str | None = "node-0") -> Devices:
    devices = Devices()
    assert devices.add_list(host, text)
    return devices


@pytest.mark.parametrize(
    ("text", "infiniband", "ethernet"),
    [
        (" [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.4<0>", ["mlx5_0"], []),
        (" [0]mlx4_0:1/IB ; OOB ib0:172.16.1.4<0>", ["mlx4_0"], []),
        (" [0]ibP111p0s0:1/IB [1]rdmaP1111p0s2:1/RoCE [RO]; OOB eth0:10.2.0.4<0>", ["ibP111p0s0"], ["rdmaP1111p0s2"]),
        (" [0]={[0] mlx5_0:1/IB, [1] mlx5_1:2/IB} [1]mlx5_2:1/IB [RO]", ["mlx5_0", "mlx5_1", "mlx5_2"], []),
        (" [0]mlx5_bond_0:1/RoCE [1]bnxt_re0:1/RoCE", [], ["bnxt_re0", "mlx5_bond_0"]),
        ("NET/IB: [2] mlx5_2:uverbs2:1/RoCE provider=Mlx5 speed=400000 context=0x5563", [], ["mlx5_2"]),
        (" [0]mlx5_10:1/IB/SHARP [1]mlx5_9:1/IB/SHARP ; OOB eth0:10.0.0.4<0>", ["mlx5_9", "mlx5_10"], []),
    ],
)
def test_lists(text: str, infiniband: list[str], ethernet: list[str]) -> None:
    devices = read(text)
    assert list(devices.with_link("IB")) == infiniband
    assert list(devices.with_link("RoCE")) == ethernet
    assert devices.sharp == ("/SHARP" in text)


@pytest.mark.parametrize("text", [" ; OOB eth0:10.0.0.4<0>", " [0]mlx5_0:1/", " [0]eth0:10.0.0.4<0>", ""])
def test_no_devices(text: str) -> None:
    assert not Devices().add_list(None, text)


def test_the_link_layer_of_a_channel_is_that_of_its_device() -> None:
    devices = read(" [0]mlx5_ib0:1/IB [1]mlx5_an0:1/RoCE")
    assert not devices.is_ethernet("node-0", 0)
    assert devices.is_ethernet("node-0", 1)
    assert not devices.is_ethernet("node-0", 7), "an index that is not listed may be InfiniBand"
    assert not devices.is_ethernet()


def test_hosts_number_their_devices_themselves() -> None:
    devices = read(" [0]mlx5_an0:1/RoCE [1]mlx5_ib0:1/IB")
    devices.add_list("node-1", " [0]mlx5_ib0:1/IB")
    assert devices.is_ethernet("node-0", 0)
    assert not devices.is_ethernet("node-1", 0)


def test_gids_betray_ethernet_where_no_device_is_listed() -> None:
    devices = Devices()
    assert not devices.is_ethernet()
    devices.gids = True
    assert devices.is_ethernet()


def test_names_without_link_layer() -> None:
    devices = Devices()
    devices.add_name("mlx5_1+mlx5_0")
    assert list(devices.with_link(None)) == ["mlx5_0", "mlx5_1"]
    devices.add_name("mlx5_1", "IB")
    devices.add_name("mlx5_1")
    assert devices.links == {"mlx5_0": None, "mlx5_1": "IB"}


def test_memory_is_bounded() -> None:
    devices = Devices()
    for index in range(LIMIT + 10):
        devices.add_list(f"host-{index}", f"[0]mlx5_{index}:1/IB")
    assert len(devices.links) == LIMIT
