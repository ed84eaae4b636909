from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.network.nccl_log.devices import (
    LIMIT,
    Devices,
    Route,
    count,
    family,
    fastest,
    parse_route,
    remember,
    slowest,
)


def test_the_first_value_stays() -> None:
    kept: dict[str, int] = {}
    remember(kept, "a", 1)
    remember(kept, "a", 2)
    assert kept == {"a": 1}


def test_no_more_than_the_limit_is_kept() -> None:
    kept: dict[int, None] = {}
    for key in range(LIMIT + 5):
        remember(kept, key, None)
    assert list(kept) == list(range(LIMIT))


def test_known_keys_are_counted_beyond_the_limit() -> None:
    counts: dict[int, int] = {}
    for key in [*range(LIMIT + 5), 0, LIMIT + 1]:
        count(counts, key, 2)
    assert len(counts) == LIMIT
    assert (counts[0], counts[1]) == (4, 2)


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        ("IB", "verbs"),
        ("IBext", "verbs"),
        ("IBext_v10", "verbs"),
        ("NCCL RDMA Plugin v9", "verbs"),
        ("UCX", "verbs"),
        ("UCX-RMA", "verbs"),
        ("gIB", "verbs"),
        ("SHARP", "verbs"),
        ("Socket", "socket"),
        ("FastSocket", "socket"),
        ("AWS Libfabric", "ofi"),
        ("Libfabric", "ofi"),
        ("OFI", "ofi"),
        ("FasTrak", None),
        ("IBIS", None),
        ("SocketPlus", None),
        ("", None),
    ],
)
def test_family(network: str, expected: str | None) -> None:
    assert family(network) == expected


def test_the_slowest_sets_the_pace() -> None:
    assert slowest(["ib", "socket", "roce"]) == "socket"
    assert slowest(["ib", "roce"]) == "roce"
    assert slowest(["ib", "unknown"]) == "ib"
    assert slowest([]) == slowest(["unknown"]) == "unknown"


def test_the_fastest_could_be_used() -> None:
    assert fastest(["socket", "ib", "roce"]) == "ib"
    assert fastest(["socket", "unknown"]) == "socket"
    assert fastest([]) == "unknown"


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


NETWORKS = ["IB", "IBext", "IBext_v8", "Socket", "AWS Libfabric", "Libfabric", "NCCL RDMA Plugin v8", "gIB"]


@given(
    network=st.sampled_from(NETWORKS),
    device=st.integers(0, 31),
    proxy=st.none() | st.integers(0, 4095),
    gpudirect=st.sampled_from(["", "/GDRDMA", "/GDRDMA(PCI)"]),
    shared=st.sampled_from(["", "/Shared"]),
    rccl=st.sampled_from(["", " comm 0x557519a97630 nRanks 02"]),
)
def test_every_form_of_a_network(
    network: str, device: int, proxy: int | None, gpudirect: str, shared: str, rccl: str
) -> None:
    text = f"NET/{network}/{device}{'' if proxy is None else f'({proxy})'}{gpudirect}{shared}{rccl}"
    assert parse_route(text) == Route(
        name=f"NET/{network}",
        network=network,
        device=device,
        gpudirect=bool(gpudirect),
        proxied=proxy is not None,
        collnet=False,
    )


def test_sharp() -> None:
    assert parse_route("COLLNET/SHARP/5/GDRDMA") == Route("COLLNET/SHARP", "SHARP", 5, True, False, True)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("P2P/IPC", "P2P/IPC"),
        ("P2P/IPC/read", "P2P/IPC/read"),
        ("P2P/direct pointer", "P2P/direct pointer"),
        ("P2P/direct pointer/read comm 0x5f4c0370 nRanks 08", "P2P/direct pointer/read"),
        ("P2P/indirect/3[1a000]", "P2P/indirect"),
        ("P2P/CUMEM", "P2P/CUMEM"),
        ("P2P/CUMEM/read/CE", "P2P/CUMEM/read/CE"),
        ("P2P/MNNVL", "P2P/MNNVL"),
        ("SHM/direct/direct", "SHM/direct/direct"),
        ("SHM/CE/direct", "SHM/CE/direct"),
        ("direct shared memory", "direct shared memory"),
        ("P2P/CUMEMnode-1:12:12 [0] ", "P2P/CUMEM"),
    ],
)
def test_inside_a_node(text: str, name: str) -> None:
    assert parse_route(text) == Route(name)


@pytest.mark.parametrize("text", ["", "NET", "NET/", "NET/I", "NET/IB", "NET/IB/", "COLLNET/SHARP/", "P2P/", "the VPN"])
def test_what_is_cut_off_is_no_route(text: str) -> None:
    assert parse_route(text) is None


@given(st.text(max_size=200))
def test_no_text_raises(text: str) -> None:
    route = parse_route(text)
    assert route is None or (route.network is None) == (route.device is None)
