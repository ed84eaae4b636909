"""GPUs, their driver, torch's build and the number of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from azureml_strategy.network.doctor.gpus import check_gpus
from azureml_strategy.network.findings import Finding

ReadFacts = Callable[..., Any]
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Oct 19 18:56:32 UTC 2023\nGCC version: 12\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22)\n"


def by_subject(facts: Any) -> dict[str, Finding]:
    return {finding.subject: finding for finding in check_gpus(facts)}


@pytest.mark.parametrize("wording", [CLOSED, OPEN])
@pytest.mark.parametrize(
    ("driver", "cuda", "verdict"),
    [
        ("535.129.03", "12.8.90", "ok"),
        ("525.60.13", "12.1.105", "ok"),
        ("470.82.01", "12.8.90", "problem"),
        ("535.129.03", "13.0.96", "problem"),
        ("580.65.06", "13.0.96", "ok"),
        ("470.82.01", None, "ok"),
    ],
)
def test_the_driver_against_cuda(
    tree: Any, read: ReadFacts, wording: str, driver: str, cuda: str | None, verdict: str
) -> None:
    tree.nvidia("Tesla T4", 1)
    tree.write("proc/driver/nvidia/version", wording.format(driver))
    finding = by_subject(read(cuda=cuda))["driver"]
    assert finding.verdict == verdict
    assert f"NVIDIA {driver}" in finding.text


def test_an_old_driver_with_compatibility_libraries(tree: Any, read: ReadFacts) -> None:
    tree.nvidia("Tesla T4", 1)
    tree.write("proc/driver/nvidia/version", CLOSED.format("535.129.03"))
    tree.write("usr/local/cuda/compat/libcuda.so.1", "")
    assert by_subject(read(cuda="13.0.96"))["driver"].verdict == "ok"


@pytest.mark.parametrize(
    ("vendor", "torch", "wrong"),
    [
        ("nvidia", "2.13.0", False),
        ("nvidia", "2.13.0+cu130", False),
        ("nvidia", "2.6.0a0+ecf3bae40a.nv25.01", False),
        ("nvidia", "2.13.0+cpu", True),
        ("nvidia", "2.13.0+rocm6.4", True),
        ("nvidia", None, False),
        ("amd", "2.13.0+rocm6.4", False),
        ("amd", "2.6.0a0+git3b1ab0e", False),
        ("amd", "2.13.0+cu130", True),
        ("amd", "2.13.0+cpu", True),
    ],
)
def test_the_build_of_torch(tree: Any, read: ReadFacts, vendor: str, torch: str | None, wrong: bool) -> None:
    getattr(tree, vendor)("some model", 2)
    assert ("torch" in by_subject(read(torch=torch))) == wrong


@pytest.mark.parametrize(
    ("processes", "verdict", "text"),
    [(1, "ok", "4 x "), (4, "ok", "4 x "), (2, "warning", "2 stay idle"), (8, "problem", "two ranks on one GPU")],
)
def test_processes_for_gpus(
    tree: Any, read: ReadFacts, job: ReadFacts, processes: int, verdict: str, text: str
) -> None:
    tree.nvidia("NVIDIA A100 80GB PCIe", 4)
    finding = list(check_gpus(read(job("NC96ads_A100_v4", processes=processes))))[-1]
    assert finding.verdict == verdict
    assert text in finding.text


def test_a_container_without_its_gpus(read: ReadFacts, job: ReadFacts) -> None:
    (finding,) = check_gpus(read(job("ND96isr_H100_v5")))
    assert (finding.verdict, finding.text) == ("problem", "8 are promised, none can be seen here.")


def test_a_pod_that_was_given_some(tree: Any, read: ReadFacts) -> None:
    """Kubernetes promises fewer than the size has."""
    tree.nvidia("NVIDIA H100 80GB HBM3", 2)
    environ = {"AZUREML_RUN_ID": "run", "AMLARC_NUM_GPU_PER_WORKER": "2"}
    assert by_subject(read(environ))["GPUs"].verdict == "ok"


def test_models_that_the_driver_hides(tree: Any, read: ReadFacts) -> None:
    for index in range(2):
        tree.write(f"dev/nvidia{index}", "")
    assert by_subject(read())["GPUs"].text == "2 x GPU (the driver hides its model)"
