from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.network.conftest import Tree

from azureml_strategy.network.infiniband import HCA, natural_order, read_hcas


def hcas(tree: Tree) -> tuple[HCA, ...]:
    return read_hcas(tree.root / "sys", tree.root / "dev")


def only(tree: Tree) -> HCA:
    (found,) = hcas(tree)
    return found


def test_what_sysfs_says_of_a_port(tree: Tree) -> None:
    tree.hca("mlx5_ib0", 200, numa_node=3)
    assert only(tree) == HCA(
        name="mlx5_ib0",
        port=1,
        link_layer="InfiniBand",
        state="ACTIVE",
        physical_state="LinkUp",
        rate_gbps=200,
        full_pkey=0,
        numa_node=3,
        verbs_device="uverbs0",
    )
    assert only(tree).usable


@pytest.mark.parametrize("name", ["mlx5_0", "mlx5_ib0", "mlx5_an0", "mlx4_0", "ibP111p0s0", "rdmaP1111p0s2"])
def test_names_decide_nothing(tree: Tree, name: str) -> None:
    tree.hca(name, 56)
    assert only(tree).usable
    shutil.rmtree(tree.root)
    tree.accelerated_networking(name)
    assert not only(tree).usable
    assert only(tree).is_ethernet
    assert only(tree).fault == "its link layer is Ethernet, not InfiniBand"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"state": "1: DOWN", "phys_state": "2: Polling"}, "its port is DOWN (Polling)"),
        ({"state": "2: INIT"}, "its port is INIT (LinkUp)"),
        ({"state": "garbage", "phys_state": ""}, "its port is in an unknown state (link unknown)"),
        ({"pkeys": ("0x0000",)}, "it is full member of no partition (pkey)"),
        ({"pkeys": ("0x7fff", "0x0012")}, "it is full member of no partition (pkey)"),
        ({"pkeys": ("0x8000",)}, "it is full member of no partition (pkey)"),
        ({"pkeys": ()}, "it is full member of no partition (pkey)"),
        ({"device_file": False}, "its device file is not in /dev/infiniband"),
        ({"link_layer": ""}, "its link layer is unknown, not InfiniBand"),
    ],
)
def test_why_a_port_cannot_be_used(tree: Tree, changes: dict[str, str], fault: str) -> None:
    tree.hca("mlx5_0", **changes)  # type: ignore[arg-type]
    assert (only(tree).fault, only(tree).usable) == (fault, False)


@pytest.mark.parametrize(
    ("pkeys", "index"),
    [
        (("0x8001",), 0),
        (("0xffff",), 0),
        (("0x7fff", "0x8012"), 1),
        (("0x0000", "0x7fff", "0xffff", "0x8012"), 2),
        (("binary \x00", "0x8012"), 1),
        (("0x7fff", *["0x0000"] * 9, "0x8012"), 10),  # by number: 10 is not before 2
    ],
)
def test_the_first_full_partition_key(tree: Tree, pkeys: tuple[str, ...], index: int) -> None:
    tree.hca("mlx5_0", pkeys=pkeys)
    assert only(tree).full_pkey == index
    assert only(tree).usable


def test_the_device_file_belongs_to_the_adapter_and_not_to_its_number(tree: Tree) -> None:
    for verbs, name in ((0, "mlx5_1"), (1, "mlx5_0")):
        tree.write(f"sys/class/infiniband_verbs/uverbs{verbs}/ibdev", name)
        tree.write(f"sys/class/infiniband/{name}/ports/1/link_layer", "InfiniBand")
    tree.write("sys/class/infiniband_verbs/abi_version", "6")  # a file among the folders
    tree.write("dev/infiniband/uverbs0", "")
    tree.write("dev/infiniband/rdma_cm", "")
    assert [(hca.name, hca.verbs_device) for hca in hcas(tree)] == [("mlx5_0", None), ("mlx5_1", "uverbs0")]


def test_each_port_of_an_adapter_counts_by_itself(tree: Tree) -> None:
    tree.hca("mlx5_0")
    tree.hca("mlx5_0", 100, port=2, link_layer="Ethernet")
    tree.hca("mlx5_1", port=1, state="1: DOWN")
    tree.hca("mlx5_1", port=2)
    assert [(hca.name, hca.port, hca.usable, hca.verbs_device) for hca in hcas(tree)] == [
        ("mlx5_0", 1, True, "uverbs0"),
        ("mlx5_0", 2, False, "uverbs0"),
        ("mlx5_1", 1, False, "uverbs1"),
        ("mlx5_1", 2, True, "uverbs1"),
    ]


def test_adapters_are_in_the_order_of_their_numbers(tree: Tree) -> None:
    for index in (10, 9, 1, 0, 11):
        tree.hca(f"mlx5_{index}")
    assert [hca.name for hca in hcas(tree)] == ["mlx5_0", "mlx5_1", "mlx5_9", "mlx5_10", "mlx5_11"]


@given(st.lists(st.integers(0, 10**6), max_size=6), st.sampled_from(["mlx5_", "ibP", ""]), st.sampled_from(["", "p0"]))
def test_natural_order_is_that_of_the_numbers(numbers: list[int], before: str, after: str) -> None:
    names = [f"{before}{number}{after}" for number in numbers]
    assert sorted(names, key=natural_order) == [f"{before}{number}{after}" for number in sorted(numbers)]


@given(st.lists(st.text(max_size=6), max_size=4))
def test_natural_order_compares_any_names(names: list[str]) -> None:
    assert sorted(map(natural_order, names)) == sorted(map(natural_order, reversed(names)))


@pytest.mark.parametrize(
    ("text", "rate"),
    [("400 Gb/sec (4X NDR)", 400), ("2.5 Gb/sec (1X SDR)", 2.5), ("56 Gb/sec", 56), ("1.2.3 Gb/sec", None), ("", None)],
)
def test_rates(tree: Tree, text: str, rate: float | None) -> None:
    tree.hca("mlx5_0")
    tree.write("sys/class/infiniband/mlx5_0/ports/1/rate", text)
    assert only(tree).rate_gbps == rate


@pytest.mark.parametrize(("told", "node"), [(0, 0), (1, 1), (-1, None)])  # a VM may hide it
def test_the_numa_node(tree: Tree, told: int, node: int | None) -> None:
    tree.hca("mlx5_0", numa_node=told)
    assert only(tree).numa_node == node


def test_a_machine_without_adapters(tree: Tree) -> None:
    assert hcas(tree) == ()
    tree.write("sys/class/infiniband", "not a folder")
    assert hcas(tree) == ()


@pytest.mark.parametrize("file", ["link_layer", "state", "phys_state", "rate", "pkeys", "pkeys/0"])
def test_an_entry_that_cannot_be_read_makes_one_fact_unknown(tree: Tree, file: str) -> None:
    for kind in ("folder", "dangling", "binary"):
        tree.hca("mlx5_0", pkeys=("0x8012",))
        path = tree.root / "sys/class/infiniband/mlx5_0/ports/1" / file
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "dangling":
            path.symlink_to(tree.root / "gone")
        else:
            path.write_bytes(b"\xff\x00\xfe")
        assert only(tree).name == "mlx5_0"
        assert only(tree).usable == (file in ("phys_state", "rate"))
        shutil.rmtree(tree.root)


def test_an_adapter_that_vanished_is_left_out(tree: Tree) -> None:
    tree.hca("mlx5_0")
    (tree.root / "sys/class/infiniband/mlx5_1").symlink_to("../../devices/gone")
    (tree.root / "sys/class/infiniband_verbs/uverbs1").symlink_to("../../devices/gone")
    assert only(tree).name == "mlx5_0"


FILES = ("link_layer", "state", "phys_state", "rate", "pkeys/0")


@given(st.fixed_dictionaries({file: st.binary(max_size=24) for file in FILES}), st.binary(max_size=8))
def test_no_bytes_in_sysfs_raise(contents: dict[str, bytes], other: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder))
        for file, content in contents.items():
            tree.write(f"sys/class/infiniband/mlx5_0/ports/1/{file}", content)
        tree.write("sys/class/infiniband/mlx5_0/device/numa_node", other)
        tree.write("sys/class/infiniband_verbs/uverbs0/ibdev", other)
        assert only(tree).fault
