from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.network.transport.routes import Route, parse_route

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
