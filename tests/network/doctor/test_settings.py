"""Settings in words, and what contradicts the hardware."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from azureml_strategy.network.doctor.settings import check_settings

ReadFacts = Callable[..., Any]


def test_planned_and_kept_settings(tree: Any, read: ReadFacts, job: ReadFacts) -> None:
    tree.nd96isr_h100_v5()
    tree.write("etc/nccl.conf", "# Azure\nNCCL_IB_PCI_RELAXED_ORDERING=1\n")
    environ = {**job("ND96isr_H100_v5"), "NCCL_SOCKET_IFNAME": "eth0"}
    found = {finding.subject: finding for finding in check_settings(read(environ))}
    assert {finding.verdict for finding in found.values()} == {"ok"}
    assert found["NCCL_IB_HCA"].text.startswith("=mlx5_ib0:1,mlx5_ib1:1,")
    assert "Exactly the 8 InfiniBand port(s)" in found["NCCL_IB_HCA"].text
    assert found["NCCL_SOCKET_IFNAME"].text == "eth0  Set already, in the environment; it stays."
    assert found["NCCL_IB_PCI_RELAXED_ORDERING"].text.startswith("1  Set already, in ")
    assert "etc/nccl.conf" in found["NCCL_IB_PCI_RELAXED_ORDERING"].text


def test_contradictions_come_after_and_hardware_is_not_repeated(tree: Any, read: ReadFacts, job: ReadFacts) -> None:
    tree.nd96isr_h100_v5()
    tree.memlock("65536")
    environ = {**job("ND96isr_H100_v5"), "NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5_ib0"}
    facts = read(environ)
    assert "locked memory" in [finding.subject for finding in facts.plan.findings]
    wrong = [(finding.subject, finding.verdict) for finding in check_settings(facts) if finding.verdict != "ok"]
    assert wrong == [("NCCL_IB_DISABLE=1", "problem"), ("NCCL_IB_HCA=mlx5_ib0", "warning")]
    assert "NCCL_IB_DISABLE" not in [finding.subject for finding in check_settings(facts)], (
        "it is not called ok as well"
    )


def test_a_laptop_needs_none(tree: Any, read: ReadFacts) -> None:
    tree.laptop()
    assert not list(check_settings(read()))
