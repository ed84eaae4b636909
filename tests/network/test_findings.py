from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from tests.network.conftest import Tree, job

from azureml_strategy.network.findings import Finding, find_faults, total_gbytes
from azureml_strategy.network.node import Node

H100 = "Standard_ND96isr_H100_v5"


def one(node: Node, verdict: str = "problem") -> Finding:
    (finding,) = find_faults(node)
    assert finding.verdict == verdict
    return finding


@pytest.mark.parametrize("name", ["nd96isr_h100_v5", "nc96ads_a100_v4", "nd96isr_mi300x_v5", "laptop"])
def test_a_healthy_node_has_no_findings(tree: Tree, name: str) -> None:
    assert list(find_faults(getattr(tree, name)())) == []


def test_nd40rs_v2_without_a_module_for_gpudirect(tree: Tree) -> None:
    finding = one(tree.nd40rs_v2(), "warning")
    assert str(finding).startswith("GPUDirect RDMA: no nvidia_peermem module and no open GPU driver was found, so")
    assert "modprobe nvidia_peermem" in (finding.advice or "")


def test_what_the_adapters_carry_together(tree: Tree) -> None:
    node = tree.nd96isr_h100_v5()
    assert total_gbytes(node) == 400
    assert total_gbytes(node, node.usable_hcas[:2]) == 100
    unknown = tuple(replace(hca, rate_gbps=None) for hca in node.hcas)
    assert total_gbytes(replace(node, hcas=unknown)) == 400  # by the size
    assert total_gbytes(replace(node, hcas=unknown, vm_size=None)) == 0


@pytest.mark.parametrize(
    ("changes", "text", "advice"),
    [
        ({"state": "1: DOWN", "phys_state": "2: Polling"}, "its port is DOWN (Polling)", "The node's link is down"),
        ({"pkeys": ("0x7fff",)}, "it is full member of no partition", "has not joined the cluster's partition"),
        ({"device_file": False}, "its device file is not in /dev/infiniband", "--device=/dev/infiniband"),
    ],
)
def test_adapters_of_which_none_is_usable(tree: Tree, changes: dict[str, str], text: str, advice: str) -> None:
    tree.azure()
    tree.hca("mlx5_0", 100, **changes)  # type: ignore[arg-type]
    finding = one(tree.read(job("Standard_ND40rs_v2")))
    assert finding.text.startswith(f"Standard_ND40rs_v2 has InfiniBand, but no port is usable: mlx5_0: {text}")
    assert advice in (finding.advice or "")


def test_a_container_that_sees_no_adapter(tree: Tree) -> None:
    tree.nd96isr_h100_v5()
    shutil.rmtree(tree.root / "sys/class/infiniband")
    finding = one(tree.read(job(H100)))
    assert finding.text == f"{H100} has InfiniBand, but the container sees no InfiniBand adapter."
    tree.accelerated_networking()
    assert one(tree.read(job(H100))) == finding  # accelerated networking is none


def test_an_adapter_that_is_down_while_others_work(tree: Tree) -> None:
    tree.nd96isr_h100_v5()
    tree.hca("mlx5_ib3", state="1: DOWN", phys_state="2: Polling")
    finding = one(tree.read(job(H100)))
    assert finding.subject == "InfiniBand mlx5_ib3"
    assert finding.text == (
        f"its port is DOWN (Polling); 7 of the 8 adapters of {H100} are usable, all-reduce reaches at most 88% of its "
        "bandwidth."
    )
    assert "replace the node" in (finding.advice or "")


def test_adapters_with_the_same_fault_are_told_once(tree: Tree) -> None:
    tree.nd96isr_h100_v5()
    for name in ("mlx5_ib3", "mlx5_ib5"):
        tree.hca(name, state="1: DOWN", phys_state="2: Polling")
    assert one(tree.read(job(H100))).subject == "InfiniBand mlx5_ib3, mlx5_ib5"


def test_adapters_that_are_not_there_at_all(tree: Tree) -> None:
    node = tree.nd96isr_h100_v5()
    finding = one(replace(node, hcas=node.usable_hcas[:2]))
    assert finding.text == f"2 of the 8 adapters of {H100} are usable, all-reduce reaches at most 25% of its bandwidth."
    assert finding.advice == "The node lacks adapters: replace the node, and report it to Azure."


def test_a_size_that_is_not_in_the_table_promises_no_number(tree: Tree) -> None:
    tree.nd96isr_h100_v5()
    assert list(find_faults(tree.read(job("Standard_ND96isrf_H100_v5")))) == []


def test_adapters_on_a_machine_that_promises_none(tree: Tree) -> None:
    tree.hca("mlx5_0", 200)
    tree.hca("mlx5_1", state="1: DOWN", phys_state="2: Polling")
    assert one(tree.read()).subject == "InfiniBand mlx5_1"
    assert one(tree.read(job("Standard_ND96is_H100_v5"))).subject == "InfiniBand mlx5_1"


def test_a_link_that_runs_too_slow(tree: Tree) -> None:
    tree.nd96isr_h100_v5()
    tree.hca("mlx5_ib5", 200)
    finding = one(tree.read(job(H100)))
    assert str(finding).startswith("InfiniBand mlx5_ib5: its link runs at 200 Gb/s instead of 400 Gb/s;")


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ("65536", "64 KiB"),
        ("8388608", "8192 KiB"),
        (str((1 << 30) - 1024), "1048575 KiB"),
        (str(1 << 30), None),
        ("unlimited", None),
    ],
)
def test_too_little_locked_memory(tree: Tree, limit: str, text: str | None) -> None:
    tree.nd96isr_h100_v5()
    tree.memlock(limit)
    findings = list(find_faults(tree.read(job(H100))))
    assert [finding.subject for finding in findings] == ["locked memory"] * (text is not None)
    assert all(f"the limit is {text}, " in finding.text for finding in findings)
    assert all("--ulimit memlock=-1" in (finding.advice or "") for finding in findings)
