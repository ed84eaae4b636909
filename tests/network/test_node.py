from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.network.conftest import ASSET_TAG, NOBODY, Tree, job, metadata_service, says

from azureml_strategy.network.node import (
    TIMEOUT_SECONDS,
    VM_SIZE_URL,
    Node,
    guess_vm_size,
    has_default_topology,
    instance_vm_size,
    is_azure_vm,
    read_node,
    topology_file,
)
from azureml_strategy.network.sysfs import GPUs
from azureml_strategy.network.vm_sizes import lookup_vm_size

PATIENT = 60.0  # seconds: an answer that comes is there at once, on a busy machine, too
Answer = Callable[[socket.socket], None]


def ask(answer: Answer, timeout_s: float = PATIENT) -> str | None:
    with metadata_service(answer) as (url, _):
        return instance_vm_size(url, timeout_s)


def raw(content: bytes) -> Answer:
    return lambda connection: connection.sendall(content)


@pytest.mark.parametrize("name", ["Standard_ND96isr_H100_v5", "Standard_HB120-16rs_v3", "standard_nc24r_promo"])
def test_the_name_that_it_answers(name: str) -> None:
    assert ask(says(name)) == name
    assert ask(says(f"{name}\n")) == name


def test_the_request_is_the_documented_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", NOBODY)  # a proxy would answer for a machine of its own
    with metadata_service(says("Standard_NC4as_T4_v3")) as (url, requests):
        assert instance_vm_size(url, PATIENT) == "Standard_NC4as_T4_v3"
    lines = requests[0].splitlines()
    assert lines[0] == "GET /metadata?format=text HTTP/1.1"
    assert "Metadata: true" in lines
    assert VM_SIZE_URL.startswith("http://169.254.169.254/metadata/instance/compute/vmSize?api-version=")


@pytest.mark.parametrize(
    "answer",
    [
        says("Standard_NC4as_T4_v3", "404 Not Found"),
        says("Standard_NC4as_T4_v3", "503 Service Unavailable"),
        says("Standard_NC4as_T4_v3", "302 Found"),
        says("<html>log in to the network first</html>"),
        says(""),
        says("x" * 100_000 + "?"),
        raw(b""),
        raw(b"\x00\xff\xfe" * 50),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: minus\r\n\r\n\xff\xff"),
        raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
        raw(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000),
        raw(b"HTTP/1.1 twohundred OK\r\n\r\n"),
    ],
    ids=["404", "503", "302", "html", "empty", "long", "closes", "binary", "length", "chunks", "headers", "status"],
)
def test_what_is_no_answer(answer: Answer) -> None:
    assert ask(answer) is None


def test_nobody_listens() -> None:
    assert instance_vm_size(NOBODY, PATIENT) is None


def test_a_service_that_hangs() -> None:
    answers = threading.Event()
    assert ask(lambda connection: answers.wait(), 0.3) is None
    answers.set()


def test_an_answer_that_drips() -> None:
    answered = threading.Event()

    def drip(connection: socket.socket) -> None:
        for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nStandard_NC4as_T4_v3":
            connection.sendall(bytes([byte]))
            if answered.wait(0.1):
                return

    assert ask(drip, 0.3) is None  # each byte comes in time, all together do not
    answered.set()


def test_the_start_is_not_delayed() -> None:
    assert TIMEOUT_SECONDS <= 0.5


@pytest.mark.parametrize(
    ("content", "azure"),
    [(f"{ASSET_TAG}\n", True), ("", False), ("No Asset Tag\n", False), (b"\xff\x00", False), (None, False)],
)
def test_an_azure_vm_is_told_by_its_chassis(tree: Tree, content: str | bytes | None, azure: bool) -> None:
    if content is not None:
        tree.write("sys/class/dmi/id/chassis_asset_tag", content)
    assert is_azure_vm(tree.root / "sys") == azure


def test_the_asset_tag_spells_its_meaning() -> None:
    digits = "".join(ASSET_TAG.split("-"))
    assert bytes(int(digits[i : i + 2]) for i in range(0, len(digits), 2)).decode() == "MSFT AZURE VM"


SERIES = ("ndv2", "ndv4", "ndv5", "ncv4")


@pytest.mark.parametrize(
    ("size", "series"),
    [
        ("ND40rs_v2", "ndv2"),
        ("ND96asr_v4", "ndv4"),
        ("ND96amsr_A100_v4", "ndv4"),
        ("ND96isr_H100_v5", "ndv5"),
        ("ND96isr_H200_v5", "ndv5"),
        ("NC96ads_A100_v4", "ncv4"),
        ("NC24ads_A100_v4", None),
        ("ND96isr_MI300X_v5", None),
        ("HB120rs_v3", None),
    ],
)
def test_the_file_fits_the_size(tree: Tree, size: str, series: str | None) -> None:
    written = {name: tree.topology(name) for name in SERIES}
    assert topology_file(lookup_vm_size(size), tree.root) == (series and written[series])


@pytest.mark.parametrize("place", ["opt/microsoft/ndv5-topo.xml", "opt/microsoft/ndv5/topo.xml"])
def test_both_places_of_azures_images(tree: Tree, place: str) -> None:
    size = lookup_vm_size("ND96isr_H100_v5")
    assert topology_file(size, tree.root) is None
    (tree.root / place).mkdir(parents=True)
    assert topology_file(size, tree.root) is None  # Docker makes a folder where a mounted file is not on the host
    (tree.root / place).rmdir()
    assert topology_file(size, tree.root) is None
    file = tree.write(place, "<system/>")
    assert topology_file(size, tree.root) == file


def test_without_a_size_there_is_no_file(tree: Tree) -> None:
    tree.topology("ndv5")
    assert topology_file(None, tree.root) is None


def test_the_file_that_nccl_reads_by_itself(tree: Tree) -> None:
    assert not has_default_topology(tree.root)
    tree.write("var/run/nvidia-topologyd/virtualTopology.xml", "<system/>")
    assert has_default_topology(tree.root)


H100 = "Standard_ND96isr_H100_v5"


def test_a_node_with_eight_adapters(tree: Tree) -> None:
    node = tree.nd96isr_h100_v5()
    assert (node.vm_size_name, node.vm_size_source, node.azure) == (H100, "compute context", True)
    assert node.vm_size is not None
    assert node.vm_size.name == H100
    assert [hca.name for hca in node.usable_hcas] == [f"mlx5_ib{index}" for index in range(8)]
    assert [hca.numa_node for hca in node.usable_hcas] == [0] * 4 + [1] * 4
    assert [hca.name for hca in node.hcas if not hca.usable] == ["mlx5_an0"]
    assert node.gpus == GPUs("nvidia", ("NVIDIA H100 80GB HBM3",) * 8)
    assert (node.gpudirect, node.memlock, node.topology_file) == ("nvidia_peermem", None, None)
    assert node.bootstrap is not None
    assert node.bootstrap.name == "eth0"
    file = tree.topology("ndv5")
    assert tree.read(job(H100)).topology_file == file


def test_a_laptop(tree: Tree) -> None:
    node = tree.laptop()
    assert node == Node(
        vm_size_name=None,
        vm_size_source=None,
        vm_size=None,
        azure=False,
        gpus=GPUs(None, ()),
        hcas=(),
        interfaces=node.interfaces,
        topology_file=None,
        default_topology=False,
        gpudirect=None,
        memlock=8388608,
        shared_memory=None,
    )
    assert not node.virtual


def test_an_empty_tree_is_a_node_of_which_nothing_is_known(tmp_path: Path) -> None:
    node = read_node(tmp_path / "absent", {})
    assert node.interfaces == node.hcas == ()
    assert (node.bootstrap, node.memlock, node.vm_size_name) == (None, None, None)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes is there at once, on a busy machine, too."""
    monkeypatch.setattr("azureml_strategy.network.node.instance_vm_size", partial(instance_vm_size, timeout_s=60.0))


def sources(tree: Tree, environ: dict[str, str], url: str) -> tuple[str | None, str | None]:
    found = read_node(tree.root, environ, metadata_url=url)
    return found.vm_size_name, found.vm_size_source


def test_the_size_is_from_the_job_then_the_metadata_then_the_hardware(tree: Tree, patient: None) -> None:
    tree.nd96isr_h100_v5()
    in_job = {**job(H100), "AZUREML_CR_COMPUTE_CONTEXT": "{}"}
    with metadata_service(says("Standard_ND96isrf_H100_v5")) as (url, requests):
        assert sources(tree, job("STANDARD_ND96ISR_H100_V5"), url) == ("STANDARD_ND96ISR_H100_V5", "compute context")
        assert requests == []
        assert sources(tree, in_job, url) == ("Standard_ND96isrf_H100_v5", "instance metadata")
        assert len(requests) == 1
    assert sources(tree, in_job, NOBODY) == (H100, "GPUs and HCAs")
    shutil.rmtree(tree.root / "proc/driver")
    shutil.rmtree(tree.root / "dev")
    assert sources(tree, in_job, NOBODY) == (None, None)


def test_outside_azure_nobody_is_asked(tree: Tree) -> None:
    tree.nd96isr_h100_v5()
    (tree.root / "sys/class/dmi/id/chassis_asset_tag").write_text("Some Vendor\n")
    with metadata_service(says(H100)) as (url, requests):
        assert sources(tree, {}, url) == (None, None)
        assert sources(tree, {"AZUREML_RUN_ID": "run"}, url) == (None, None)
        assert requests == []


def test_a_service_that_hangs_delays_the_start_by_its_time_out_only(tree: Tree) -> None:
    tree.azure()
    asked, answers = threading.Event(), threading.Event()

    def hang(connection: socket.socket) -> None:
        asked.set()
        answers.wait()

    with metadata_service(hang) as (url, requests):
        assert sources(tree, {}, url) == (None, None)
        assert asked.wait(60)
        answers.set()
        assert len(requests) == 1


def test_a_name_that_says_nothing_is_kept(tree: Tree) -> None:
    node = tree.read(job("GPU_H100_CUSTOM"))
    assert (node.vm_size_name, node.vm_size) == ("GPU_H100_CUSTOM", None)


def test_a_size_that_is_not_in_the_table_is_judged(tree: Tree) -> None:
    node = tree.read(job("Standard_ND96isrf_H100_v5"))
    assert node.vm_size is not None
    assert (node.vm_size.known, node.vm_size.infiniband, node.virtual) == (False, True, True)


@pytest.mark.parametrize(
    ("vendor", "model", "gpus", "hcas", "name"),
    [
        ("nvidia", "NVIDIA H100 80GB HBM3", 8, 8, "ND96isr_H100_v5"),
        ("nvidia", "NVIDIA H100 80GB HBM3", 8, 0, "ND96is_H100_v5"),
        ("nvidia", "NVIDIA H100 80GB HBM3", 8, 7, None),
        ("nvidia", "NVIDIA H100 NVL", 2, 0, "NC80adis_H100_v5"),
        ("nvidia", "NVIDIA A100-SXM4-40GB", 8, 8, "ND96asr_v4"),
        ("nvidia", "NVIDIA A100-SXM4-80GB", 8, 8, "ND96amsr_A100_v4"),
        ("nvidia", "NVIDIA A100 80GB PCIe", 4, 0, "NC96ads_A100_v4"),
        ("nvidia", "NVIDIA H200", 8, 0, "ND96is_H200_v5"),
        ("nvidia", "NVIDIA H200", 8, 8, "ND96isr_H200_v5"),  # or its twin, ND96isrf_H200_v5
        ("nvidia", "NVIDIA GB200", 4, 4, "ND128isr_NDR_GB200_v6"),
        ("nvidia", "Tesla V100-SXM2-32GB", 8, 1, "ND40rs_v2"),
        ("nvidia", "Tesla V100-PCIE-16GB", 4, 1, "NC24rs_v3"),
        ("nvidia", "Tesla V100-PCIE-16GB", 4, 0, "NC24s_v3"),
        ("nvidia", "Tesla T4", 4, 0, "NC64as_T4_v3"),
        ("nvidia", "Tesla T4", 1, 0, None),  # three sizes have one
        ("nvidia", "NVIDIA GeForce RTX 4090", 1, 0, None),
        ("nvidia", "", 8, 1, "ND40rs_v2"),  # a hidden model is no evidence, the numbers are
        ("nvidia", "", 8, 8, None),
        ("amd", "", 8, 8, "ND96isr_MI300X_v5"),
        ("amd", "", 16, 8, "ND96asr_MI200_v4"),
        (None, "", 0, 0, None),
    ],
)
def test_the_size_that_the_hardware_can_only_be(
    vendor: Literal["nvidia", "amd"] | None, model: str, gpus: int, hcas: int, name: str | None
) -> None:
    assert guess_vm_size(GPUs(vendor, (model,) * gpus), hcas) == (name and f"Standard_{name}")


@pytest.mark.parametrize(("limit", "bytes_"), [("unlimited", None), ("65536", 65536), ("?", None)])
def test_the_limit_of_locked_memory(tree: Tree, limit: str, bytes_: int | None) -> None:
    tree.memlock(limit)
    assert tree.read().memlock == bytes_


def test_this_process_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZUREML_RUN_ID", "run")
    monkeypatch.setenv("AZUREML_CR_COMPUTE_CONTEXT", '{"vm_size": "Standard_NC64as_T4_v3"}')
    node = read_node()
    assert node.vm_size_name == "Standard_NC64as_T4_v3"
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert node.memlock == (None if soft == resource.RLIM_INFINITY else soft)
    shm = os.statvfs("/dev/shm")
    assert node.shared_memory == shm.f_frsize * shm.f_blocks


@settings(max_examples=25)  # each writes a hundred files
@given(st.binary(max_size=40), st.text(max_size=20))
def test_no_bytes_in_any_file_raise(content: bytes, vm_size: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder))
        tree.nd96isr_h100_v5()
        for file in filter(Path.is_file, list(tree.root.rglob("*"))):
            file.write_bytes(content)
        node = tree.read(job(vm_size))
        assert len(node.hcas) == 9
        assert node.usable_hcas == ()
