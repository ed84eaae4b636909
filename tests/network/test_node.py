from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.network.conftest import NOBODY, Tree, job, metadata_service, says

from azureml_strategy.network.gpus import GPUs
from azureml_strategy.network.metadata import instance_vm_size
from azureml_strategy.network.node import Node, guess_vm_size, read_node

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
