from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from azureml_strategy.network.doctor.machine import check_adapters, check_gpus, check_size
from azureml_strategy.network.findings import Finding
from azureml_strategy.network.vm_sizes import known_vm_sizes

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


@pytest.mark.parametrize("size", known_vm_sizes(), ids=lambda size: size.name)
def test_every_known_size_is_described(size: Any, read: ReadFacts, job: ReadFacts) -> None:
    findings = list(check_size(read(job(size.name, nodes=2))))
    assert findings[0].verdict == "ok"
    assert findings[0].text.startswith(f"{size.name} (from compute context): {size.gpus} x {size.gpu_model}")
    assert "None" not in findings[0].text
    warnings = [finding.text for finding in findings[1:]]
    assert any("retired" in text for text in warnings) == (size.retired is not None)
    assert any("over Ethernet" in text for text in warnings) == (not size.infiniband)


@pytest.mark.parametrize(
    ("name", "verdict", "text"),
    [
        ("Standard_ND96isr_H999_v7", "warning", "not in this package's table; the nearest name in it is Standard_ND96"),
        ("Standard_ND96is_H999_v7", "warning", "no InfiniBand that a VM can use"),
        ("Standard_D4s_v5", "ok", "no GPU, by its name"),
        ("ND96isr H100 v5", "warning", "did you mean Standard_ND96isr_H100_v5?"),
        ("Standard_NC24r", "ok", "InfiniBand without SR-IOV, which a VM cannot use"),
    ],
)
def test_other_names(name: str, verdict: str, text: str, read: ReadFacts, job: ReadFacts) -> None:
    finding = next(check_size(read(job(name, nodes=1))))
    assert (finding.verdict, finding.subject) == (verdict, "VM size")
    assert text in finding.text


def test_a_job_that_does_not_name_it(read: ReadFacts, job: ReadFacts) -> None:
    (finding,) = check_size(read(job()))
    assert finding.verdict == "ok"
    assert not list(check_size(read({})))


@pytest.mark.parametrize(
    ("name", "advised"),
    [("NC80adis_H100_v5", "Standard_ND96isr_H100_v5"), ("NC64as_T4_v3", "Standard_ND96isr_H100_v5")],
)
def test_the_size_that_is_advised_has_infiniband(name: str, advised: str, read: ReadFacts, job: ReadFacts) -> None:
    *_, warning = check_size(read(job(name, nodes=4)))
    assert advised in str(warning.advice)


def test_the_time_of_an_all_reduce(read: ReadFacts, job: ReadFacts) -> None:
    """4 x NC64as_T4_v3 with 32 Gb/s: 2 x 3/4 x 1 GB at 4 GB/s."""
    *_, warning = check_size(read(job("NC64as_T4_v3", nodes=4)))
    assert "at 4 GB/s at most: an all-reduce of 1 GB of gradients takes at least 0.38 s" in warning.text
