from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.network.conftest import LOOPBACK, NOBODY, Tree, job

from azureml_strategy.network.conflicts import DeviceFilter, find_conflicts, hca_list
from azureml_strategy.network.findings import Finding
from azureml_strategy.network.node import Node, read_node

HCAS = [f"mlx5_{index}" for index in range(12)]


def selected(text: str, names: list[str] = HCAS, port: int | None = 1) -> list[str]:
    chosen = DeviceFilter.parse(text)
    return [name for name in names if chosen.selects(name, port)]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("mlx5_1", ["mlx5_1", "mlx5_10", "mlx5_11"]),  # a bare name is a prefix
        ("=mlx5_1", ["mlx5_1"]),
        ("mlx5", HCAS),
        ("=mlx5", []),
        ("^mlx5_1", [name for name in HCAS if not name.startswith("mlx5_1")]),
        ("^=mlx5_1", [name for name in HCAS if name != "mlx5_1"]),
        ("mlx5_2,mlx5_3", ["mlx5_2", "mlx5_3"]),
        ("=mlx5_2:1,mlx5_3:2", ["mlx5_2"]),
        ("mlx5_2:1", ["mlx5_2"]),
        ("mlx5_2, mlx5_3", ["mlx5_2"]),  # a blank belongs to the name
        ("mlx5_2,", ["mlx5_2"]),
        ("", HCAS),  # no name stands for every device
        ("=", HCAS),
        (":1", HCAS),
        ("^", []),
    ],
)
def test_what_a_list_selects(text: str, names: list[str]) -> None:
    assert selected(text) == names


def test_interfaces_have_no_ports() -> None:
    assert selected("eth0", ["eth0", "eth1", "lo"], port=None) == ["eth0"]
    assert selected("^eth,lo", ["eth0", "lo", "docker0"], port=None) == ["docker0"]
    assert selected("=mlx5_2:2", port=None) == ["mlx5_2"]


names = st.text("abcmlx_0123456789=^: ", min_size=1, max_size=8)


@given(st.lists(names, max_size=5).map(",".join), names, st.integers(1, 2))
def test_exclusion_is_the_opposite_of_selection(text: str, name: str, port: int) -> None:
    if not text.startswith("^"):
        chosen, others = DeviceFilter.parse(text), DeviceFilter.parse(f"^{text}")
        assert chosen.selects(name, port) != others.selects(name, port)


@given(st.lists(st.from_regex(r"mlx[45]_\d{1,3}", fullmatch=True), min_size=1, max_size=5), st.text(max_size=8))
def test_an_exact_list_selects_its_names_and_nothing_else(listed: list[str], other: str) -> None:
    text = "=" + ",".join(listed)
    assert selected(text, listed) == listed
    assert bool(selected(text, [other])) == (other in listed)
    assert all(selected(text.removeprefix("="), [f"{name}0"]) for name in listed)


def test_the_list_of_usable_ports_selects_exactly_them(tree: Tree) -> None:
    node = tree.nd96isr_h100_v5()
    text = hca_list(node.usable_hcas)
    assert re.fullmatch(r"=(mlx5_ib\d:1,?){8}", text)
    chosen = DeviceFilter.parse(text)
    assert [hca for hca in node.hcas if chosen.selects(hca.name, hca.port)] == list(node.usable_hcas)


REMOVE = "from the job's environment variables, the image and the script."


def conflicts(node: Node, source: str = "environment", **settings: str) -> list[Finding]:
    return list(find_conflicts(node, {name: (value, source) for name, value in settings.items()}, num_nodes=2))


def one(node: Node, **settings: str) -> Finding:
    (finding,) = conflicts(node, **settings)
    assert finding.subject == "=".join(*settings.items())
    return finding


def plain_names(tree: Tree, count: int) -> Node:
    """A node of an image without Azure's persistent names, whose last adapter is Ethernet."""
    tree.azure()
    for index in range(count - 1):
        tree.hca(f"mlx5_{index}", 200)
    tree.accelerated_networking(f"mlx5_{count - 1}")
    return tree.read(job("Standard_ND96amsr_A100_v4"))


@pytest.mark.parametrize(
    "settings", [{"NCCL_IB_DISABLE": "1"}, {"NCCL_IB_DISABLE": "2"}, {"NCCL_NET": "Socket"}, {"NCCL_NET": "socket"}]
)
def test_infiniband_switched_off(tree: Tree, settings: dict[str, str]) -> None:
    finding = one(tree.nd96isr_h100_v5(), **settings)
    assert finding == Finding(
        "problem",
        "=".join(*settings.items()),
        "8 InfiniBand adapter(s) with 400 GB/s stay unused; sockets carry 10 GB/s at most, 40 times less.",
        f"Remove {next(iter(settings))} {REMOVE}",
    )


def test_the_file_that_a_value_is_from(tree: Tree) -> None:
    (finding,) = conflicts(tree.nd96isr_h100_v5(), "/etc/nccl.conf", NCCL_IB_DISABLE="1")
    assert finding.subject == "NCCL_IB_DISABLE=1 in /etc/nccl.conf"
    assert finding.advice == "Remove NCCL_IB_DISABLE from /etc/nccl.conf."


def test_the_numbers_of_other_sizes(tree: Tree) -> None:
    text = one(tree.nd40rs_v2(), NCCL_IB_DISABLE="1").text
    assert text == "1 InfiniBand adapter(s) with 12.5 GB/s stay unused; sockets carry 3 GB/s at most, 4 times less."


def test_numbers_that_nobody_knows_are_left_out(tree: Tree) -> None:
    node = tree.nd40rs_v2()
    unknown = replace(node, vm_size=None, hcas=tuple(replace(hca, rate_gbps=None) for hca in node.hcas))
    text = one(unknown, NCCL_IB_DISABLE="1").text
    assert text == "1 InfiniBand adapter(s) stay unused; traffic between nodes goes through sockets."
    by_interface = replace(node, vm_size=None)
    assert "sockets carry 6.25 GB/s at most, 2 times less" in one(by_interface, NCCL_IB_DISABLE="1").text


@pytest.mark.parametrize("value", ["0", "", "true", "yes"])
def test_what_nccl_does_not_take_for_a_yes(tree: Tree, value: str) -> None:
    assert conflicts(tree.nd96isr_h100_v5(), NCCL_IB_DISABLE=value) == []


def test_settings_that_fit(tree: Tree) -> None:
    fitting = {"NCCL_IB_HCA": "mlx5_ib", "NCCL_NET": "IB", "NCCL_SOCKET_IFNAME": "=eth0", "NCCL_NET_GDR_LEVEL": "SYS"}
    assert conflicts(tree.nd96isr_h100_v5(), GLOO_SOCKET_IFNAME="eth0", NCCL_DEBUG="INFO", **fitting) == []
    laptop = Tree(tree.root / "laptop").laptop()
    assert conflicts(laptop, NCCL_IB_DISABLE="1", NCCL_P2P_DISABLE="1", NCCL_NET_GDR_LEVEL="LOC") == []


def test_adapters_that_are_not_there(tree: Tree) -> None:
    finding = one(tree.nd40rs_v2(), NCCL_IB_HCA="mlx5_0")
    assert finding.verdict == "problem"
    assert finding.text == (
        "it selects none of the usable InfiniBand ports (mlx5_ib0:1); sockets carry 3 GB/s at most, 4 times less."
    )


def test_accelerated_networking_alone(tree: Tree) -> None:
    assert one(tree.nd96isr_h100_v5(), NCCL_IB_HCA="mlx5_an0").verdict == "problem"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("mlx5_ib0", "it selects 1 of 8 usable InfiniBand ports: 50 of 400 GB/s."),
        ("=mlx5_ib0:1,mlx5_ib1:1", "it selects 2 of 8 usable InfiniBand ports: 100 of 400 GB/s."),
        ("^mlx5_ib7,mlx5_an", "it selects 7 of 8 usable InfiniBand ports: 350 of 400 GB/s."),
        ("mlx5_ib0, mlx5_ib1", "it selects 1 of 8 usable InfiniBand ports: 50 of 400 GB/s."),
    ],
)
def test_too_few_adapters(tree: Tree, value: str, text: str) -> None:
    finding = one(tree.nd96isr_h100_v5(), NCCL_IB_HCA=value)
    assert (finding.verdict, finding.text) == ("warning", text)


def test_partition_keys_at_different_indices(tree: Tree) -> None:
    for index, pkeys in enumerate([("0x8012", "0x7fff"), ("0x7fff", "0x8012"), ("0x8012", "0x7fff")]):
        tree.hca(f"mlx5_{index}", pkeys=pkeys)
    node = tree.read({})
    (finding,) = conflicts(node)
    assert (finding.verdict, finding.subject) == ("problem", "InfiniBand partition")
    assert "is at index 0 on mlx5_0, mlx5_2; 1 on mlx5_1, but NCCL takes one index" in finding.text
    remedy = {"NCCL_IB_PKEY": "0", "NCCL_IB_HCA": "=mlx5_0:1,mlx5_2:1"}
    assert all(f"{name}={value}" in (finding.advice or "") for name, value in remedy.items())
    assert [each.verdict for each in conflicts(node, **remedy)] == ["warning"]  # of the adapter that is left out


def test_a_prefix_selects_more_than_it_says(tree: Tree) -> None:
    node = plain_names(tree, 12)
    share, roce = conflicts(node, NCCL_IB_HCA="mlx5_1")
    assert share.text == "it selects 2 of 11 usable InfiniBand ports: 50 of 275 GB/s."  # mlx5_1 and mlx5_10
    assert roce.text == "it also selects mlx5_11, which is Ethernet: NCCL would mix RoCE with InfiniBand."
    assert one(node, NCCL_IB_HCA="=mlx5_1").text == "it selects 1 of 11 usable InfiniBand ports: 25 of 275 GB/s."


def test_a_prefix_of_plain_names_takes_the_ethernet_adapter_in(tree: Tree) -> None:
    node = plain_names(tree, 9)
    finding = one(node, NCCL_IB_HCA="mlx5")
    assert (finding.verdict, "mlx5_8, which is Ethernet" in finding.text) == ("warning", True)
    assert conflicts(node, NCCL_IB_HCA="^mlx5_8") == []


@pytest.mark.parametrize("level", ["LOC", "PIX", "PXB", "0", "1", "2"])
def test_gpudirect_switched_off_by_distance(tree: Tree, level: str) -> None:
    node = tree.nd96isr_h100_v5()
    finding = one(node, NCCL_NET_GDR_LEVEL=level)
    assert (finding.verdict, finding.advice) == ("warning", "Set NCCL_NET_GDR_LEVEL=SYS.")
    file = tree.topology("ndv5")
    assert conflicts(replace(node, topology_file=file), NCCL_NET_GDR_LEVEL=level) == []
    assert conflicts(replace(node, default_topology=True), NCCL_NET_GDR_LEVEL=level) == []
    assert conflicts(node, NCCL_NET_GDR_LEVEL=level, NCCL_TOPO_FILE=str(file)) == []
    assert conflicts(replace(node, gpudirect=None), NCCL_NET_GDR_LEVEL=level) == []


def test_ordered_writes_in_a_vm(tree: Tree) -> None:
    node = tree.nd96isr_h100_v5()
    finding = one(node, NCCL_IB_PCI_RELAXED_ORDERING="0")
    assert (finding.verdict, finding.text) == ("warning", "GPUDirect RDMA writes are slow in a VM.")
    assert conflicts(replace(node, azure=False, vm_size=None), NCCL_IB_PCI_RELAXED_ORDERING="0") == []


def test_roce_over_accelerated_networking(tree: Tree) -> None:
    node = tree.nc96ads_a100_v4()
    finding = one(node, NCCL_IB_DISABLE="0")
    assert (finding.verdict, "(mlx5_an0) for InfiniBand and run RoCE" in finding.text) == ("warning", True)
    assert conflicts(node, NCCL_IB_DISABLE="1", NCCL_NET="Socket") == []
    assert conflicts(replace(node, hcas=()), NCCL_IB_DISABLE="0") == []


def test_infiniband_demanded_where_there_is_none(tree: Tree) -> None:
    assert one(tree.nc96ads_a100_v4(), NCCL_NET="IB").verdict == "problem"
    cluster = Tree(tree.root / "elsewhere")
    cluster.accelerated_networking("mlx5_0")
    assert conflicts(cluster.read(), NCCL_NET="IB", NCCL_IB_DISABLE="0") == []  # RoCE by intent


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("NCCL_SOCKET_IFNAME", "eno1", "no interface that is up has this name; there are eth0, lo. Nodes cannot meet."),
        ("NCCL_SOCKET_IFNAME", "ib", "no interface that is up has this name; there are eth0, lo. Nodes cannot meet."),
        ("NCCL_SOCKET_IFNAME", "^eth", "it leaves only the loopback interface, by which no other node is reached."),
        ("NCCL_SOCKET_IFNAME", "eth", None),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", None),
        ("GLOO_SOCKET_IFNAME", "eth", "no interface that is up has this name; there are eth0, lo. Nodes cannot meet."),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", "no interface that is up has this name; there are eth0, lo. Nodes cannot "),
        ("GLOO_SOCKET_IFNAME", "lo", "it leaves only the loopback interface, by which no other node is reached."),
        ("GLOO_SOCKET_IFNAME", "eth0,lo", None),
    ],
)
def test_interfaces(tree: Tree, name: str, value: str, found: str | None) -> None:
    findings = conflicts(tree.nc24rs_v3(), **{name: value})
    assert [finding.verdict for finding in findings] == ["problem"] * (found is not None)
    assert all(finding.text.startswith(str(found)) for finding in findings)


def test_interfaces_that_nothing_is_known_of(tmp_path: Path) -> None:
    node = read_node(tmp_path / "absent", {}, metadata_url=NOBODY)
    assert conflicts(node, NCCL_SOCKET_IFNAME="eth0", GLOO_SOCKET_IFNAME="eth0") == []


def test_a_lone_loopback_interface(tree: Tree) -> None:
    tree.interface("lo", kind=LOOPBACK)
    assert one(tree.read(), NCCL_SOCKET_IFNAME="eth0").text.startswith("no interface that is up has this name; there ")


def test_a_topology_file_that_is_not_there(tree: Tree) -> None:
    node = tree.nd96isr_h100_v5()
    assert one(node, NCCL_TOPO_FILE="/opt/microsoft/ndv5-topo.xml").text.startswith("there is no such file here")
    assert conflicts(node, NCCL_TOPO_FILE=str(tree.topology("ndv5"))) == []


def test_gpus_that_may_not_talk_directly(tree: Tree) -> None:
    text = "GPUs of one node talk through the host's memory"
    assert one(tree.nd96isr_h100_v5(), NCCL_P2P_DISABLE="1").text == f"{text} instead of 460 GB/s."
    (pair, single) = (Tree(tree.root / name) for name in ("pair", "single"))
    pair.nvidia("Tesla T4", 2)
    single.nvidia("Tesla T4", 1)
    assert one(pair.read(), NCCL_P2P_DISABLE="1").text == f"{text}."
    assert conflicts(single.read(), NCCL_P2P_DISABLE="1") == []
    assert one(Tree(tree.root / "other").nc24rs_v3(), NCCL_P2P_DISABLE="1").text == f"{text}."


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("NCCL_GRAPH_FILE", "/opt/microsoft/ncv4/graph.xml", "with fewer GPUs or adapters NCCL fails to start"),
        ("CUDA_LAUNCH_BLOCKING", "1", "a tool for debugging only"),
        ("NCCL_MIN_CHANNELS", "32", "NCCL knows no such variable. It is NCCL_MIN_CTAS"),
        ("NCCL_DEBUG_SUBSYS", "INIT,warn", "WARN is a level (NCCL_DEBUG), no subsystem"),
    ],
)
def test_traps_on_any_machine(tree: Tree, name: str, value: str, part: str) -> None:
    finding = one(tree.laptop(), **{name: value})
    assert finding.verdict == "warning"
    assert part in str(finding)


def test_the_graph_file_of_azures_own_image_stays_on_its_own_size(tree: Tree, tmp_path: Path) -> None:
    node = tree.nc96ads_a100_v4()
    graph = tmp_path / "ncv4/graph.xml"
    graph.parent.mkdir()
    assert one(node, NCCL_GRAPH_FILE=str(graph)).verdict == "warning", "it is not there"
    graph.touch()
    assert conflicts(node, NCCL_GRAPH_FILE=str(graph)) == []
    for size in ("Standard_NC48ads_A100_v4", "Standard_NC24ads_A100_v4"):  # older images set it there as well
        assert one(tree.read(job(size)), NCCL_GRAPH_FILE=str(graph)).verdict == "warning"
    assert one(Tree(tmp_path / "laptop").laptop(), NCCL_GRAPH_FILE=str(graph)).verdict == "warning"


def test_traps_that_are_none(tree: Tree) -> None:
    settings = {"CUDA_LAUNCH_BLOCKING": "0", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_MIN_NCHANNELS": "32"}
    assert conflicts(tree.laptop(), NCCL_GRAPH_FILE="", **settings) == []
