from __future__ import annotations

import re

import pytest

from azureml_strategy.gpus import find_gpu, gpu_of, known_gpus
from azureml_strategy.network.vm_sizes import known_vm_sizes, lookup_vm_size


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("Tesla K80", "K80"),
        ("Tesla P100-PCIE-16GB", "P100 PCIe 16GB"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB"),
        ("Tesla V100-PCIE-32GB", "V100 PCIe 32GB"),
        ("A100-SXM4-40GB", "A100 SXM4 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM4 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM5"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X OAM", "MI300X"),
    ],
)
def test_by_the_name_of_the_driver(driver: str, name: str) -> None:
    found = find_gpu(driver)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("V100", "V100 SXM2 32GB"),
        ("v100 16GB", "V100 SXM2 16GB"),
        ("V100 PCIe 16GB", "V100 PCIe 16GB"),
        ("A100", "A100 SXM4 80GB"),
        ("A100-40GB", "A100 SXM4 40GB"),
        ("H100", "H100 SXM5"),
        ("H100 94GB", "H100 NVL"),
        ("GB300 288GB", "GB300"),
        (" RTX 4090 ", "RTX 4090"),
    ],
)
def test_by_the_model(text: str, name: str) -> None:
    found = find_gpu(text)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "text",
    [
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA A10-12Q",
        "GRID T4-8C",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GB200 MIG 1g.23gb",
        "A100 60GB",
        "H300",
        "GB",
        "",
    ],
)
def test_nobody_knows_slices_and_others(text: str) -> None:
    assert find_gpu(text) is None


@pytest.mark.parametrize(
    ("size", "name"),
    [
        ("NC24r", "K80"),
        ("ND24rs", "P40"),
        ("NC24rs_v2", "P100 PCIe 16GB"),
        ("NC24rs_v3", "V100 PCIe 16GB"),
        ("ND40rs_v2", "V100 SXM2 32GB"),
        ("NC64as_T4_v3", "T4"),
        ("NC24ads_A100_v4", "A100 PCIe 80GB"),
        ("NC96ads_A100_v4", "A100 PCIe 80GB"),
        ("ND96asr_v4", "A100 SXM4 40GB"),
        ("ND96amsr_A100_v4", "A100 SXM4 80GB"),
        ("NC40ads_H100_v5", "H100 NVL"),
        ("NC80adis_H100_v5", "H100 NVL"),
        ("ND96isr_H100_v5", "H100 SXM5"),
        ("ND96isr_H200_v5", "H200"),
        ("ND96asr_MI200_v4", "MI250X"),
        ("ND96isr_MI300X_v5", "MI300X"),
        ("ND128isr_NDR_GB200_v6", "GB200"),
        ("ND128isr_GB300_v6", "GB300"),
    ],
)
def test_the_gpu_of_a_size(size: str, name: str) -> None:
    found = gpu_of(lookup_vm_size(size))
    assert found is not None
    assert found.name == name


def test_every_size_with_gpus_has_one() -> None:
    assert [size.name for size in known_vm_sizes() if (gpu_of(size) is None) != (size.gpus == 0)] == []


@pytest.mark.parametrize("size", ["D4s_v3", "NV6ads_A10_v5", "NC24ads_H100_v9", "NV12"])
def test_no_gpu_or_perhaps_a_slice(size: str) -> None:
    # NV6ads_A10_v5 has a sixth of an A10.
    assert gpu_of(lookup_vm_size(size)) is None


def test_names_are_of_one_gpu_each() -> None:
    names = [gpu.name for gpu in known_gpus()]
    assert len(set(names)) == len(names)
    for gpu in known_gpus():
        assert find_gpu(gpu.name) == gpu
        assert sum(re.fullmatch(other.driver, gpu.name) is not None for other in known_gpus()) == 0


def test_units() -> None:
    for gpu in known_gpus():
        assert 1 < gpu.peaks["32"] < 200, gpu.name
        assert all(peak >= gpu.peaks["32"] for peak in gpu.peaks.values()), gpu.name
        assert 100 < gpu.memory_bandwidth < 10_000, gpu.name
        assert 8 <= gpu.memory_gb <= 300, gpu.name
        assert 10 < gpu.multiprocessors < 400, gpu.name
        assert (gpu.nvlink_bandwidth or 0) < gpu.memory_bandwidth, gpu.name
        assert 3 <= gpu.pcie <= 6, gpu.name
        assert 2014 <= gpu.year <= 2026, gpu.name
        assert gpu.source.strip(), gpu.name
    years = [gpu.year for gpu in known_gpus()]
    assert max(years) - min(years) > 10


@pytest.mark.parametrize("name", ["K80", "M60", "P40", "P100", "V100", "V100 PCIe 16GB", "T4"])
def test_before_ampere_there_is_neither_bf16_nor_tf32(name: str) -> None:
    found = find_gpu(name)
    assert found is not None
    assert not {"bf16", "tf32", "fp8"} & found.peaks.keys()


def test_peaks_agree_with_clocks_and_multiprocessors() -> None:
    """A multiprocessor's operations a cycle are known; so each float32 peak is a clock that a GPU can have."""
    per_cycle = {"K80": 192, "P100": 64, "V100": 64, "T4": 64, "A100": 64, "MI250X": 256, "MI300X": 256}
    for gpu in known_gpus():
        gigahertz = gpu.peaks["32"] * 1e3 / (2 * per_cycle.get(gpu.model, 128) * gpu.multiprocessors)
        assert 0.8 < gigahertz < 2.6, (gpu.name, gigahertz)
