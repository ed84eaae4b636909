"""Adapters, GPUDirect RDMA, topology and interface in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from azureml_strategy.network.doctor.adapters import check_adapters
from azureml_strategy.network.findings import Finding

ReadFacts = Callable[..., Any]


def found(facts: Any, subject: str) -> list[Finding]:
    return [finding for finding in check_adapters(facts) if finding.subject == subject]


def test_equal_adapters_share_a_line_and_others_do_not(tree: Any, read: ReadFacts) -> None:
    for index in (0, 1, 9, 10):
        tree.hca(f"mlx5_{index}", 200, numa_node=-1)
    tree.hca("mlx5_11", 100, numa_node=3)
    tree.memlock("unlimited")
    assert [finding.text for finding in found(read(), "HCAs")] == [
        "mlx5_0 ... mlx5_10 (4): InfiniBand, 200 Gb/s each, ACTIVE, NUMA node hidden",
        "mlx5_11: InfiniBand, 100 Gb/s, ACTIVE, NUMA 3",
    ]


def test_a_workstation_whose_port_is_idle_has_no_problem(tree: Any, read: ReadFacts) -> None:
    tree.hca("mlx4_0", 56, state="1: DOWN", phys_state="2: Polling")
    (finding,) = check_adapters(read())
    assert finding.verdict == "ok"
    assert finding.text == "mlx4_0: InfiniBand, 56 Gb/s, DOWN, NUMA 0; not usable: its port is DOWN (Polling)"


def test_faults_are_said_once(tree: Any, read: ReadFacts, job: ReadFacts) -> None:
    tree.nd96isr_h100_v5()
    tree.hca("mlx5_ib3", state="2: INIT")
    findings = list(check_adapters(read(job("ND96isr_H100_v5"))))
    mentions = [finding for finding in findings if "mlx5_ib3" in f"{finding.subject} {finding.text}"]
    assert [finding.verdict for finding in mentions] == ["problem"]
    assert [finding.text.split(":")[0] for finding in findings if finding.subject == "HCAs"] == [
        "mlx5_ib0 ... mlx5_ib2 (3)",
        "mlx5_ib4 ... mlx5_ib7 (4)",
    ]


def test_unreadable_entries(tree: Any, read: ReadFacts) -> None:
    tree.write("sys/class/infiniband/mlx5_0/ports/1/state", b"\xff\xfe")
    (finding,) = found(read(), "RDMA over Ethernet")
    assert finding.text.startswith("mlx5_0: link layer unknown, rate unknown, state unknown, NUMA node hidden")


def test_none_of_it(tree: Any, read: ReadFacts, job: ReadFacts) -> None:
    assert [str(finding) for finding in check_adapters(read())] == ["InfiniBand: none"]
    tree.laptop()
    assert [str(finding) for finding in check_adapters(read())] == ["InfiniBand: none"]
    hidden = found(read(job("ND96isr_H100_v5")), "InfiniBand")
    assert [finding.verdict for finding in hidden] == ["problem"]


@pytest.mark.parametrize(
    ("path", "verdict", "text"),
    [
        ("opt/microsoft/ndv5-topo.xml", "ok", "ndv5-topo.xml"),
        ("var/run/nvidia-topologyd/virtualTopology.xml", "ok", "by itself"),
        ("elsewhere.xml", "warning", "none for Standard_ND96isr_H100_v5 is here"),
    ],
)
def test_the_topology_file(tree: Any, read: ReadFacts, job: ReadFacts, path: str, verdict: str, text: str) -> None:
    tree.nd96isr_h100_v5()
    tree.write(path, "<system/>")
    (finding,) = found(read(job("ND96isr_H100_v5")), "topology file")
    assert finding.verdict == verdict
    assert text in finding.text


def test_one_gpu_needs_no_topology(tree: Any, read: ReadFacts, job: ReadFacts) -> None:
    tree.nvidia("NVIDIA A100 80GB PCIe", 1)
    assert not found(read(job("NC24ads_A100_v4")), "topology file")


def test_the_interface_of_several_nodes(tree: Any, read: ReadFacts, job: ReadFacts) -> None:
    assert not found(read(job()), "interface"), "nothing can be read"
    tree.interface("lo", state="unknown", kind=772)
    tree.interface("ib0", kind=32)
    (missing,) = found(read(job()), "interface")
    assert missing.verdict == "warning"
    assert "there are ib0, lo" in missing.text
    tree.interface("eth0", speed=80000)
    assert [str(finding) for finding in found(read(job()), "interface")] == [
        "interface: eth0, 80 Gb/s: nodes meet over it"
    ]
    assert not found(read(), "interface"), "a laptop meets nobody"
