from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.network.conftest import INFINIBAND, LOOPBACK, ROUTES, Tree

from azureml_strategy.network.sysfs import Interface, bootstrap_interface, read_interfaces


def interfaces(tree: Tree) -> tuple[Interface, ...]:
    return read_interfaces(tree.root / "sys", tree.root / "proc")


def bootstrap(tree: Tree) -> str | None:
    found = bootstrap_interface(interfaces(tree))
    return found and found.name


def test_what_the_kernel_says_of_interfaces(tree: Tree) -> None:
    tree.interface("lo", state="unknown", kind=LOOPBACK)
    tree.interface("ib0", state="down", kind=INFINIBAND, speed=100000)
    tree.interface("eth0", speed=50000, default=True)
    tree.interface("docker0", state="down", speed=-1)
    tree.write("sys/class/net/bonding_masters", "")  # a file, no interface
    assert interfaces(tree) == (
        Interface("docker0", up=False, kind="ethernet", speed_gbps=None, default_route=False),
        Interface("eth0", up=True, kind="ethernet", speed_gbps=50, default_route=True),
        Interface("ib0", up=False, kind="ipoib", speed_gbps=100, default_route=False),
        Interface("lo", up=True, kind="loopback", speed_gbps=None, default_route=False),
    )


def test_the_interfaces_of_this_machine() -> None:
    names = {name for _, name in socket.if_nameindex()}
    found = {interface.name: interface for interface in read_interfaces()}
    assert found.keys() == names
    assert found["lo"].kind == "loopback"


@pytest.mark.parametrize(
    ("states", "default", "chosen"),
    [
        ({"eth0": "up", "eth1": "up"}, "eth1", "eth0"),  # every Azure VM has eth0
        ({"eth0": "down", "eth1": "up"}, "eth1", "eth1"),
        ({"wlp2s0": "up", "docker0": "up"}, "wlp2s0", "wlp2s0"),
        ({"eth0": "unknown"}, "", "eth0"),  # what the kernel says of many virtual ones
        ({"ens3": "up"}, "", None),
        ({"eth0": "down"}, "eth0", None),
        ({}, "", None),
    ],
)
def test_the_interface_by_which_nodes_meet(
    tree: Tree, states: dict[str, str], default: str, chosen: str | None
) -> None:
    for name, state in states.items():
        tree.interface(name, state=state, default=name == default)
    assert bootstrap(tree) == chosen


def test_neither_ip_over_infiniband_nor_loopback_is_chosen(tree: Tree) -> None:
    tree.interface("lo", kind=LOOPBACK, default=True)
    tree.interface("ib0", kind=INFINIBAND, default=True)
    assert bootstrap(tree) is None


def test_a_network_behind_a_gateway_is_no_default_route(tree: Tree) -> None:
    tree.interface("tun0")
    tree.write("proc/net/route", f"{ROUTES}tun0\t00000000\t0100000A\t0003\t0\t0\t0\t00000080\t0\t0\t0\ntun0\n")
    assert bootstrap(tree) is None  # 0.0.0.0/1, as VPNs write it, and a line that is cut


@given(st.binary(max_size=200), st.binary(max_size=16), st.binary(max_size=16), st.binary(max_size=16))
def test_no_bytes_raise(route: bytes, state: bytes, kind: bytes, speed: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder))
        tree.write("proc/net/route", route)
        for file, content in (("operstate", state), ("type", kind), ("speed", speed)):
            tree.write(f"sys/class/net/eth0/{file}", content)
        assert len(interfaces(tree)) <= 1


def test_unreadable_entries(tree: Tree) -> None:
    tree.interface("eth0", default=True)
    for file in ("speed", "type"):
        (tree.root / f"sys/class/net/eth0/{file}").unlink(missing_ok=True)
        (tree.root / f"sys/class/net/eth0/{file}").mkdir()
    os.symlink("../../devices/gone", tree.root / "sys/class/net/eth1")
    (tree.root / "proc/net/route").unlink()
    assert interfaces(tree) == (Interface("eth0", True, "ethernet", None, False),)
