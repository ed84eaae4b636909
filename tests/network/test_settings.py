"""Each setting: on which node it is wanted, with which value, and where it is not."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from tests.network.conftest import LOOPBACK, Tree, job

from azureml_strategy.network.nccl import Setting, wanted_settings
from azureml_strategy.network.node import Node
from azureml_strategy.network.vm_sizes import lookup_vm_size

H100 = "Standard_ND96isr_H100_v5"
EIGHT = "=" + ",".join(f"mlx5_ib{index}:1" for index in range(8))


def wanted(node: Node, num_nodes: int = 2) -> dict[str, str]:
    settings = list(wanted_settings(node, num_nodes))
    assert all(setting.reason.endswith(".") and setting.source for setting in settings)
    variables = {setting.variable: setting.value for setting in settings}
    assert len(variables) == len(settings), "a variable is set twice"
    return variables


def reason(node: Node, variable: str) -> str:
    return next(setting.reason for setting in wanted_settings(node, 2) if setting.variable == variable)


def test_nd96isr_h100_v5(tree: Tree) -> None:
    assert wanted(tree.nd96isr_h100_v5()) == {
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": EIGHT,
        "NCCL_IB_PCI_RELAXED_ORDERING": "1",
        "NCCL_NET_GDR_LEVEL": "SYS",
        "NCCL_IB_QPS_PER_CONNECTION": "4",
    }


def test_the_topology_file_is_named_only_where_it_is(tree: Tree) -> None:
    tree.nd96isr_h100_v5()
    file = tree.topology("ndv5")
    with_file = wanted(tree.read(job(H100)))
    assert with_file["NCCL_TOPO_FILE"] == str(file)
    assert (with_file["NCCL_IGNORE_CPU_AFFINITY"], with_file["CUDA_DEVICE_ORDER"]) == ("1", "PCI_BUS_ID")
    assert "NCCL_NET_GDR_LEVEL" not in with_file
    file.unlink()
    without = wanted(tree.read(job(H100)))
    assert not {"NCCL_TOPO_FILE", "NCCL_IGNORE_CPU_AFFINITY", "CUDA_DEVICE_ORDER"} & without.keys()
    assert without["NCCL_NET_GDR_LEVEL"] == "SYS"


def test_a_topology_file_that_nccl_finds_by_itself_needs_no_setting(tree: Tree) -> None:
    tree.nd96isr_h100_v5()
    tree.write("var/run/nvidia-topologyd/virtualTopology.xml", "<system/>")
    assert not {"NCCL_TOPO_FILE", "NCCL_NET_GDR_LEVEL"} & wanted(tree.read(job(H100))).keys()


def test_nd40rs_v2(tree: Tree) -> None:
    """EDR, where the images ask for neither relaxed ordering nor GPUDirect."""
    tree.nd40rs_v2()
    file = tree.topology("ndv2")
    assert wanted(tree.read(job("Standard_ND40rs_v2"))) == {
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "=mlx5_ib0:1",
        "NCCL_TOPO_FILE": str(file),
        "NCCL_IGNORE_CPU_AFFINITY": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def test_nc24rs_v3_with_mlx4(tree: Tree) -> None:
    assert wanted(tree.nc24rs_v3()) == {
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "=mlx4_0:1",
    }


def test_nc96ads_a100_v4_gets_no_accidental_roce(tree: Tree) -> None:
    node = tree.nc96ads_a100_v4()
    plain = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1"}
    assert wanted(node) == plain
    assert reason(node, "NCCL_IB_DISABLE").startswith("Accelerated networking (mlx5_an0) is no InfiniBand")


def test_nc96ads_a100_v4_gets_azures_topology_without_its_graph(tree: Tree) -> None:
    """The graph file is for all four GPUs: NCCL fails in a group of two, as those of a tensor-parallel mesh."""
    plain = wanted(tree.nc96ads_a100_v4())
    file = tree.topology("ncv4")
    tree.write("opt/microsoft/ncv4-graph.xml", "<graphs/>")
    tree.write("opt/microsoft/ncv4/graph.xml", "<graphs/>")
    assert wanted(tree.read(job("Standard_NC96ads_A100_v4"))) == plain | {
        "NCCL_TOPO_FILE": str(file),
        "NCCL_IGNORE_CPU_AFFINITY": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    for smaller in ("Standard_NC24ads_A100_v4", "Standard_NC48ads_A100_v4"):  # they have no file of their own
        assert wanted(tree.read(job(smaller))) == plain


def test_nd96isr_mi300x_v5(tree: Tree) -> None:
    tree.topology("ndv5")
    assert wanted(tree.nd96isr_mi300x_v5()) == {
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": EIGHT,
        "NCCL_IB_PCI_RELAXED_ORDERING": "1",
        "NCCL_NET_GDR_LEVEL": "SYS",
    }


def test_nd128isr_gb200_v6(tree: Tree) -> None:
    node = tree.nd128isr_gb200_v6()
    rack = {
        "NCCL_MNNVL_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "1",
        "NCCL_DMABUF_ENABLE": "1",
        "NCCL_NET_GDR_C2C": "1",
        "NCCL_SHM_DISABLE": "1",
    }
    sockets = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    assert wanted(node) == {
        **sockets,
        **rack,
        "NCCL_IB_HCA": "=mlx5_ib0:1,mlx5_ib1:1,mlx5_ib2:1,mlx5_ib3:1",
        "NCCL_IB_PCI_RELAXED_ORDERING": "1",
        "NCCL_NET_GDR_LEVEL": "PHB",
        "NCCL_IB_QPS_PER_CONNECTION": "4",
        "NCCL_IB_SL": "1",
    }
    assert wanted(replace(node, hcas=())) == sockets | rack  # one rack needs no InfiniBand


def test_a_laptop(tree: Tree) -> None:
    assert wanted(tree.laptop(), num_nodes=1) == {"NCCL_SOCKET_IFNAME": "wlp2s0"}


def test_without_an_interface_nothing_is_said_of_sockets(tree: Tree) -> None:
    tree.interface("lo", kind=LOOPBACK)
    assert wanted(tree.read()) == {}


def test_one_node_needs_neither_gloo_nor_several_paths(tree: Tree) -> None:
    node = tree.nd96isr_h100_v5()
    assert wanted(node).keys() - wanted(node, num_nodes=1).keys() == {
        "GLOO_SOCKET_IFNAME",
        "NCCL_IB_QPS_PER_CONNECTION",
    }


@pytest.mark.parametrize(
    ("size", "paths"),
    [("ND96isr_H100_v5", True), ("ND96isr_H200_v5", True), ("ND96asr_v4", False), ("ND96isr_MI300X_v5", False)],
)
def test_several_paths_from_hopper_on(tree: Tree, size: str, paths: bool) -> None:
    node = replace(tree.nd96isr_h100_v5(), vm_size=lookup_vm_size(size))
    assert ("NCCL_IB_QPS_PER_CONNECTION" in wanted(node)) == paths


def test_only_usable_ports_are_named(tree: Tree) -> None:
    tree.azure()
    tree.hca("mlx5_0")
    tree.hca("mlx5_1", state="1: DOWN")
    tree.hca("mlx5_2", pkeys=("0x7fff",))
    tree.hca("mlx5_3", device_file=False)
    tree.hca("mlx5_10")
    tree.hca("mlx5_10", port=2)
    tree.accelerated_networking("mlx5_4")
    node = tree.read(job(H100))
    assert wanted(node)["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_10:1,mlx5_10:2"
    assert reason(node, "NCCL_IB_HCA").endswith("left out: mlx5_1, mlx5_2, mlx5_3, mlx5_4.")


@pytest.mark.parametrize(
    ("first", "second", "index"),
    [
        (("0x8012",), ("0x8012",), None),
        (("0x7fff", "0x8012"), ("0x7fff", "0x8012"), "1"),
        (("0x7fff", "0x8012"), ("0x8012",), None),  # there is one variable for all adapters
    ],
)
def test_the_index_of_the_partition_key(
    tree: Tree, first: tuple[str, ...], second: tuple[str, ...], index: str | None
) -> None:
    tree.hca("mlx5_0", pkeys=first)
    tree.hca("mlx5_1", pkeys=second)
    assert wanted(tree.read()).get("NCCL_IB_PKEY") == index


@pytest.mark.parametrize(
    ("gbps", "azure", "gpudirect", "ordering", "level"),
    [
        (400, True, "DMA-BUF", "1", "SYS"),
        (200, True, "nvidia_peermem", "1", "SYS"),
        (200, True, None, "1", None),
        (100, True, "nvidia_peermem", None, None),
        (400, False, "nvidia_peermem", None, None),  # no VM: the bus is seen as it is
    ],
)
def test_gpudirect_in_a_vm(
    tree: Tree, gbps: int, azure: bool, gpudirect: str | None, ordering: str | None, level: str | None
) -> None:
    tree.hca("mlx5_0", gbps)
    node = replace(tree.read(), azure=azure, gpudirect=gpudirect)
    found = wanted(node)
    assert (found.get("NCCL_IB_PCI_RELAXED_ORDERING"), found.get("NCCL_NET_GDR_LEVEL")) == (ordering, level)


def test_a_rate_that_cannot_be_read_is_no_fast_one(tree: Tree) -> None:
    tree.azure()
    tree.hca("mlx5_0")
    node = tree.read()
    unknown = replace(node, hcas=tuple(replace(hca, rate_gbps=None) for hca in node.hcas))
    assert wanted(node).keys() - wanted(unknown).keys() == {"NCCL_IB_PCI_RELAXED_ORDERING"}


def no_infiniband(tree: Tree, size: str | None) -> Setting | None:
    node = tree.read(job(size) if size else {})
    return next((setting for setting in wanted_settings(node, 2) if setting.variable == "NCCL_IB_DISABLE"), None)


def test_infiniband_is_switched_off_where_there_can_be_none(tree: Tree) -> None:
    tree.azure()
    found = no_infiniband(tree, "Standard_NC64as_T4_v3")
    assert found is not None
    assert found.reason == "Standard_NC64as_T4_v3 has no InfiniBand."
    assert no_infiniband(tree, "Standard_NC24rs_v2") is not None  # RDMA without SR-IOV
    assert no_infiniband(tree, H100) is None  # a fault, not a lack
    tree.accelerated_networking()
    assert no_infiniband(tree, H100) is not None  # the faulty node would run RoCE, the others InfiniBand
    assert no_infiniband(tree, None) is not None


def test_roce_is_left_alone_outside_azure(tree: Tree) -> None:
    tree.accelerated_networking("mlx5_0")
    assert no_infiniband(tree, None) is None


def test_an_adapter_of_unknown_kind_is_left_to_nccl(tree: Tree) -> None:
    tree.azure()
    tree.hca("mlx5_0", link_layer="")
    assert no_infiniband(tree, H100) is None


def test_a_container_without_device_files_uses_no_adapter(tree: Tree) -> None:
    tree.nd96isr_h100_v5()
    shutil.rmtree(tree.root / "dev/infiniband")
    assert "NCCL_IB_HCA" not in wanted(tree.read(job(H100)))
