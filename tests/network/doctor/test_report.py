"""A report's verdict, sum, exit code and document; whole reports of a node with each thing broken, and of a laptop."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.network.doctor import Report, Section, examine, render
from azureml_strategy.network.findings import Finding, Verdict


def report(*verdicts: Verdict) -> Report:
    findings = tuple(Finding(verdict, "subject", "text", "advice") for verdict in verdicts)
    return Report((Section("One", findings[:1]), Section("Two", findings[1:])), {"node": {"gpus": 8}})


@pytest.mark.parametrize(
    ("verdicts", "verdict", "summary", "exit_code"),
    [
        ((), "ok", "no problems", 0),
        (("ok", "ok"), "ok", "no problems", 0),
        (("ok", "warning"), "warning", "no problems, 1 warning", 0),
        (("problem",), "problem", "1 problem", 1),
        (("warning", "problem", "problem", "warning"), "problem", "2 problems, 2 warnings", 1),
    ],
)
def test_the_worst_finding_decides(verdicts: tuple[Verdict, ...], verdict: str, summary: str, exit_code: int) -> None:
    found = report(*verdicts)
    assert (found.verdict, found.summary, found.exit_code) == (verdict, summary, exit_code)


def test_the_document_has_checks_and_facts() -> None:
    document = json.loads(report("ok", "problem").to_json())
    assert document == {
        "verdict": "problem",
        "summary": "1 problem",
        "checks": [
            {"section": "One", "verdict": "ok", "subject": "subject", "text": "text", "advice": "advice"},
            {"section": "Two", "verdict": "problem", "subject": "subject", "text": "text", "advice": "advice"},
        ],
        "node": {"gpus": 8},
    }


H100 = "Standard_ND96isr_H100_v5"


@pytest.fixture
def healthy(tree: Any) -> Any:
    """An ND96isr_H100_v5 on which nothing is missing."""
    tree.nd96isr_h100_v5()
    tree.topology("ndv5")
    tree.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu 2025\n")
    tree.write("dev/shm/.keep", "")
    tree.write("tmp/.keep", "")
    limits(tree, "unlimited", 1048576)
    return tree


def limits(tree: Any, memlock: str, files: int) -> None:
    tree.memlock(memlock)
    with (tree.root / "proc/self/limits").open("a") as file:
        file.write(f"Max open files            {files:<20} {1048576:<20} files     \n")


def by_verdict(report: Report, verdict: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.verdict == verdict]


def subjects(report: Report) -> dict[str, Finding]:
    return {finding.subject: finding for finding in report.findings}


def test_a_node_as_it_should_be(healthy: Any, job: Callable[..., Any], versions: Any) -> None:
    report = examine(healthy.root, job(H100, processes=8), versions)
    assert (report.verdict, report.summary, report.exit_code) == ("ok", "no problems", 0), render(report, 100)
    assert [section.title for section in report.sections] == [
        "Job",
        "Machine",
        "Network",
        "Settings",
        "Software",
        "Storage",
    ]
    found = subjects(report)
    assert "global rank 0 of 16, local rank 0 of 8, node 0 of 2; rank 0 at 10.0.0.4:6105" in found["launch"].text
    assert "8 x H100 80 GB (NVLink 4), 8 HCA(s) of 400 Gb/s, Ethernet 80 Gb/s" in found["VM size"].text
    assert found["GPUs"].text == "8 x NVIDIA H100 80GB HBM3"
    assert found["driver"].text == "NVIDIA 570.86.15"
    assert found["HCAs"].text == "mlx5_ib0 ... mlx5_ib7 (8): InfiniBand, 400 Gb/s each, ACTIVE, NUMA 0, 1"
    assert "no InfiniBand" in found["RDMA over Ethernet"].text
    assert found["NCCL_IB_HCA"].text.startswith("=mlx5_ib0:1,mlx5_ib1:1,")
    assert found["topology file"].text.endswith("/opt/microsoft/ndv5-topo.xml")
    assert found["GPUDirect RDMA"].text == "by nvidia_peermem"
    assert found["locked memory"].text == "no limit"


BREAKAGES: dict[str, tuple[Callable[[Any], Any], dict[str, str], str, str, str]] = {
    "one HCA down": (
        lambda tree: tree.hca("mlx5_ib3", state="1: DOWN", phys_state="2: Polling"),
        {},
        "problem",
        "InfiniBand mlx5_ib3",
        "its port is DOWN (Polling)",
    ),
    "no full partition key": (
        lambda tree: [tree.hca(f"mlx5_ib{index}", pkeys=("0x7fff",)) for index in range(8)],
        {},
        "problem",
        "InfiniBand",
        "full member of no partition",
    ),
    "no verbs devices": (
        lambda tree: [file.unlink() for file in (tree.root / "dev/infiniband").iterdir()],
        {},
        "problem",
        "InfiniBand",
        "not in /dev/infiniband",
    ),
    "memlock of 64 KiB": (lambda tree: limits(tree, "65536", 1048576), {}, "problem", "locked memory", "64 KiB"),
    "few open files": (lambda tree: limits(tree, "unlimited", 1024), {}, "warning", "open files", "at most 1024"),
    "no topology file": (
        lambda tree: (tree.root / "opt/microsoft/ndv5-topo.xml").unlink(),
        {},
        "warning",
        "topology file",
        "/opt/microsoft",
    ),
    "InfiniBand switched off": (
        lambda tree: None,
        {"NCCL_IB_DISABLE": "1"},
        "problem",
        "NCCL_IB_DISABLE=1",
        "8 InfiniBand adapter(s) with 400 GB/s stay unused",
    ),
    "blocking launches": (
        lambda tree: None,
        {"CUDA_LAUNCH_BLOCKING": "1"},
        "warning",
        "CUDA_LAUNCH_BLOCKING=1",
        "debugging only",
    ),
    "a GPU is gone": (
        lambda tree: (
            (tree.root / "proc/driver/nvidia/gpus/0005:00:00.0/information").unlink()
            or (tree.root / "proc/driver/nvidia/gpus/0005:00:00.0").rmdir()
        ),
        {},
        "problem",
        "GPUs",
        "8 are promised, only 7 x NVIDIA H100",
    ),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_what_is_broken_is_named_with_what_to_do(
    breakage: str, healthy: Any, job: Callable[..., Any], versions: Any
) -> None:
    break_it, environ, verdict, subject, text = BREAKAGES[breakage]
    break_it(healthy)
    report = examine(healthy.root, {**job(H100), **environ}, versions)
    found = by_verdict(report, verdict)
    assert any(subject == each.subject and text in each.text and each.advice for each in found), render(report, 100)
    assert report.verdict == verdict
    assert report.exit_code == (verdict == "problem")
    others = {each.subject.split()[0] for each in report.findings if each.verdict != "ok"}
    assert others == {subject.split()[0]}, "one fault raises no other alarm"


def test_all_of_it_at_once(healthy: Any, job: Callable[..., Any], versions: Any) -> None:
    for break_it, _, _, _, _ in BREAKAGES.values():
        break_it(healthy)
    environ = {**job(H100), "NCCL_IB_DISABLE": "1", "CUDA_LAUNCH_BLOCKING": "1"}
    report = examine(healthy.root, environ, versions)
    assert report.exit_code == 1
    assert {"InfiniBand", "GPUs"} <= {finding.subject for finding in by_verdict(report, "problem")}
    assert report.summary in render(report, 80).splitlines()[-1]


def test_a_size_without_infiniband(tree: Any, job: Callable[..., Any], versions: Any) -> None:
    tree.nc96ads_a100_v4()
    tree.topology("ncv4")
    one = examine(tree.root, job("NC96ads_A100_v4", nodes=1), versions)
    assert one.summary == "no problems"
    assert "mlx5_an0: Ethernet, 100 Gb/s" in subjects(one)["RDMA over Ethernet"].text
    assert subjects(one)["NCCL_IB_DISABLE"].text.startswith("1 ")
    two = examine(tree.root, job("NC96ads_A100_v4", nodes=2), versions)
    (warning,) = by_verdict(two, "warning")
    assert "at 10 GB/s at most: an all-reduce of 1 GB of gradients takes at least 0.1 s" in warning.text
    assert "ND96amsr_A100_v4" in str(warning.advice)
    assert two.exit_code == 0


def test_a_laptop_is_left_in_peace(tree: Any, versions: Any) -> None:
    tree.laptop()
    tree.write("tmp/.keep", "")
    report = examine(tree.root, {}, versions)
    assert report.summary == "no problems"
    assert len(list(report.findings)) <= 10
    assert "Settings" not in [section.title for section in report.sections]


def test_emulated_nodes_are_one_machine(tree: Any, job: Callable[..., Any], versions: Any) -> None:
    tree.laptop()
    report = examine(tree.root, job(address="127.0.2.1"), versions)
    assert report.summary == "no problems"
    assert "node 0 of 2; rank 0 at 127.0.2.1:6105" in subjects(report)["launch"].text
    assert "Settings" not in [section.title for section in report.sections]


def test_an_empty_machine(tree: Any, versions: Any) -> None:
    assert examine(tree.root, {}, versions).exit_code == 0


READ = (
    *("RANK", "WORLD_SIZE", "AZUREML_RUN_ID", "AZUREML_CR_COMPUTE_CONTEXT", "MLFLOW_TRACKING_URI", "NCCL_IB_HCA"),
    *("AZUREML_NODE_COUNT", "MASTER_ADDR", "NCCL_SOCKET_IFNAME", "TF_CONFIG", "HOME", "NCCL_CONF_FILE"),
)


# What a process can be given: bytes, which Python decodes so that any of them can be.
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
BYTES = st.binary(max_size=30).map(lambda content: os.fsdecode(content.replace(b"\0", b"")))


@given(st.dictionaries(st.sampled_from(READ), TEXTS | BYTES))
def test_no_environment_takes_the_report_down(tmp_path_factory: pytest.TempPathFactory, environ: Any) -> None:
    report = examine(tmp_path_factory.getbasetemp() / "no such folder", environ)
    text = render(report, 80)
    text.encode()
    assert text.splitlines()[-1] == report.summary
    assert report.to_json()
