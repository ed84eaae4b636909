from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from azureml_strategy.network.doctor.software import check_launch, check_settings


def test_in_a_job(tree: Any, read: Callable[..., Any], job: Callable[..., Any]) -> None:
    launch, found = check_launch(read(job(nodes=4, processes=8)))
    assert launch.text == ("pytorch: global rank 0 of 32, local rank 0 of 8, node 0 of 4; rank 0 at 10.0.0.4:6105")
    assert found.text == (
        "quirky_plum, experiment resnet50, workspace emulated, compute emulated, priority dedicated, attempt 1"
    )
    assert {launch.verdict, found.verdict} == {"ok"}


def test_a_launch_that_contradicts_itself_is_a_problem(read: Callable[..., Any], job: Callable[..., Any]) -> None:
    finding = next(check_launch(read({**job(), "WORLD_SIZE": "3"})))
    assert finding.verdict == "problem"
    assert "WORLD_SIZE" in finding.text or "world_size" in finding.text


def test_an_unknown_number_of_nodes_is_no_problem_but_limits_the_diagnosis(read: Callable[..., Any]) -> None:
    six = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.4"}
    finding = next(check_launch(read({"AZUREML_RUN_ID": "run", **six})))
    assert finding.verdict == "warning"
    assert "no variable says over how many nodes" in finding.text
    assert "set AZUREML_NODE_COUNT" in finding.text


def test_several_nodes_without_a_distribution(read: Callable[..., Any]) -> None:
    finding = next(check_launch(read({"AZUREML_RUN_ID": "run", "AZUREML_NODE_COUNT": "2"})))
    assert finding.verdict == "problem"
    assert "distribution: {type: pytorch" in finding.text


@pytest.mark.parametrize(
    ("environ", "text"),
    [({}, "not in an Azure ML job"), ({"AZUREML_RUN_ID": "run"}, "one process, without a launcher")],
)
def test_without_a_launch(environ: dict[str, str], text: str, read: Callable[..., Any]) -> None:
    finding = next(check_launch(read(environ)))
    assert finding.verdict == "ok"
    assert text in finding.text


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
