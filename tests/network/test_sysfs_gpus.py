from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.network.conftest import Tree

from azureml_strategy.network.sysfs import GPUs, cuda_started, gpudirect_support, read_gpus


def gpus(tree: Tree) -> GPUs:
    return read_gpus(tree.root / "sys", tree.root / "proc", tree.root / "dev")


def gpudirect(tree: Tree) -> str | None:
    return gpudirect_support(tree.root / "sys", tree.root / "proc")


def test_nvidia_gpus_by_their_models(tree: Tree) -> None:
    tree.nvidia("NVIDIA H100 80GB HBM3", 8)
    assert gpus(tree) == GPUs("nvidia", ("NVIDIA H100 80GB HBM3",) * 8)


def test_a_container_may_have_only_the_device_files(tree: Tree) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        tree.write(f"dev/{name}", "")
    assert gpus(tree) == GPUs("nvidia", ("", ""))


def test_a_model_that_cannot_be_read_is_counted_all_the_same(tree: Tree) -> None:
    tree.nvidia("Tesla T4", 1)
    tree.write("proc/driver/nvidia/gpus/0001:00:00.0/information", "IRQ: 5\n")
    (tree.root / "proc/driver/nvidia/gpus/0002:00:00.0/information").mkdir(parents=True)
    assert gpus(tree) == GPUs("nvidia", ("Tesla T4", "", ""))


def test_amd_gpus_have_simd_units_and_cpus_have_none(tree: Tree) -> None:
    tree.amd("ip discovery", 8)
    assert gpus(tree) == GPUs("amd", ("",) * 8)


def test_a_machine_without_gpus(tree: Tree) -> None:
    assert gpus(tree) == GPUs(None, ())
    tree.amd("", 0)
    assert gpus(tree) == GPUs(None, ())


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_no_bytes_raise(information: bytes, properties: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder))
        tree.write("sys/class/kfd/kfd/topology/nodes/0/properties", properties)
        assert len(gpus(tree).models) <= 1
        tree.write("proc/driver/nvidia/gpus/0/information", information)
        tree.write("proc/driver/nvidia/version", information)
        assert len(gpus(tree).models) == 1
        assert gpudirect(tree) is None


@pytest.mark.parametrize(
    ("file", "content", "found"),
    [
        ("sys/module/nvidia_peermem/version", "535.161.08", "nvidia_peermem"),
        ("sys/module/nv_peer_mem/version", "1.3", "nv_peer_mem"),
        ("sys/kernel/mm/memory_peers/nv_mem/version", "1.1", "nv_mem"),
        ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15", "DMA-BUF"),
        ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08", None),
        ("sys/module/amdgpu/version", "6.7.0", "amdgpu"),
        ("sys/module/nvidia/version", "535.161.08", None),
        ("proc/driver/nvidia/version", b"\xff\x00", None),
    ],
)
def test_what_gpudirect_rdma_works_by(tree: Tree, file: str, content: str | bytes, found: str | None) -> None:
    tree.write(file, content)
    assert gpudirect(tree) == found


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler to make a driver of")
@pytest.mark.parametrize(("status", "started"), [(0, True), (3, False), (100, True)])
def test_whether_cuda_has_started(tmp_path: Path, status: int, started: bool) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(f"int cuDeviceGetCount(int *count) {{ *count = 0; return {status}; }}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    assert cuda_started(str(library)) is started


def test_without_a_driver_cuda_has_not_started(tmp_path: Path) -> None:
    assert not cuda_started(str(tmp_path / "libcuda.so.1"))
