from __future__ import annotations

import datetime
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.network import vm_sizes
from azureml_strategy.network.vm_sizes import (
    UnknownVMSize,
    VMName,
    VMSize,
    bare_name,
    known_vm_sizes,
    lookup_vm_size,
    nearest_vm_size,
    parse_vm_name,
)


def parsed(name: str) -> VMName:
    found = parse_vm_name(name)
    assert found is not None, name
    return found


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Standard_ND96isr_H100_v5", ("ND", 96, "isr", "H100", 5)),
        ("Standard_ND96asr_v4", ("ND", 96, "asr", None, 4)),
        ("Standard_ND128isr_NDR_GB200_v6", ("ND", 128, "isr", "GB200", 6)),
        ("Standard_ND128isrG5_GB300_v6", ("ND", 128, "isr", "GB300", 6)),
        ("Standard_ND96is_noIB_H100_v5", ("ND", 96, "is", "H100", 5)),
        ("STANDARD_ND96AMS_A100_FLEX_V4", ("ND", 96, "ams", "A100", 4)),
        ("Standard_NC144lds_xl_RTXPRO6000BSE_v6", ("NC", 144, "lds", "RTXPRO6000BSE", 6)),
        ("Standard_NCC40ads_H100_v5", ("NCC", 40, "ads", "H100", 5)),
        ("Standard_NV24ads_V710_v5", ("NV", 24, "ads", "V710", 5)),
        ("Standard_NC6", ("NC", 6, "", None, 1)),
        ("Standard_NC24r_Promo", ("NC", 24, "r", None, 1)),
        ("Standard_HB120-16rs_v3", ("HB", 120, "rs", None, 3)),
        ("Standard_HC44rs", ("HC", 44, "rs", None, 1)),
        ("Standard_DS11-1_v2", ("DS", 11, "", None, 2)),
        ("Standard_DS11_v2_Promo", ("DS", 11, "", None, 2)),
        ("Standard_M176ds_3_v3", ("M", 176, "ds", None, 3)),
        ("Standard_DC2as_cc_v5", ("DC", 2, "as", None, 5)),
        ("Standard_FX48-12mds_v2", ("FX", 48, "mds", None, 2)),
        ("Standard_D4s_v3", ("D", 4, "s", None, 3)),
        ("Standard_A8_v2", ("A", 8, "", None, 2)),
        ("Standard_M128", ("M", 128, "", None, 1)),
    ],
)
def test_the_parts_of_a_name(name: str, parts: tuple[str, int, str, str | None, int]) -> None:
    for written in (name, name.lower(), name.upper(), f"  {name.removeprefix('Standard_')}\n"):
        found = parsed(written)
        assert (found.family, found.vcpus, found.letters, found.model, found.generation) == parts


@pytest.mark.parametrize(
    ("name", "rdma", "sr_iov"),
    [
        ("ND96isr_H100_v5", True, True),
        ("ND96isrf_H100_v5", True, True),
        ("ND40rs_v2", True, True),
        ("HB60rs", True, True),
        ("HB120rs_v3", True, True),
        ("HC44-16rs", True, True),
        ("HX176rs", True, True),
        ("NC24r", True, False),
        ("NC24r_Promo", True, False),
        ("NC24rs_v2", True, False),
        ("NC24rs_v3", True, True),
        ("ND24rs", True, False),
        ("H16mr", True, False),
        ("H16r_Promo", True, False),
        ("A8", True, False),
        ("A9", True, False),
        ("A8_v2", False, False),
        ("A7", False, False),
        ("NC6_Promo", False, False),
        ("ND96is_H100_v5", False, False),
        ("ND96is_noIB_H100_v5", False, False),
        ("NC144ds_xl_RTXPRO6000BSE_v6", False, False),
        ("D4s_v3", False, False),
        ("E64_v3", False, False),
    ],
)
def test_infiniband_from_the_letters(name: str, rdma: bool, sr_iov: bool) -> None:
    found = parsed(name)
    assert (found.rdma, found.sr_iov) == (rdma, sr_iov)


@pytest.mark.parametrize("model", ["H100", "H200", "A100", "A10", "V100", "P40", "T4", "L4", "L40", "MI300X", "GB200"])
def test_a_gpu_is_no_size(model: str) -> None:
    assert parse_vm_name(model) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Standard_",
        "Standard",
        "ND",
        "96",
        "gpu-cluster",
        "ND96isrH100v5",
        "ND96isrH100_v5",
        "ND96isr_H100v5",
        "ND96isr__H100_v5",
        "ND96isr_H100_v5_",
        "ND96isr H100 v5",
        "Standard_Standard_NC6",
        "XY12s_v3",
        "ND96isr_H100_v5; rm -rf /",
        "ND٩٦isr_H100_v5",
    ],
)
def test_what_is_no_name(text: str) -> None:
    assert parse_vm_name(text) is None


@given(st.text(max_size=40) | st.from_regex(r"(Standard_)?[A-Z]{1,3}[0-9]{1,4}[a-z]{0,7}(_[A-Za-z0-9]{0,6}){0,3}"))
def test_no_text_breaks_it(text: str) -> None:
    found = parse_vm_name(text)
    assert found is None or found.text == bare_name(text)
    assert found is None or not found.sr_iov or found.rdma


@given(
    st.sampled_from(["NC", "ND", "HB", "D", "E"]),
    st.integers(1, 999),
    st.text("adimst", min_size=1, max_size=4),
    st.sampled_from(["H100", "RTXPRO6000BSE", "R9R", "xl_RTXPRO6000BSE", "NDR"]),
    st.integers(3, 9),
)
def test_only_the_additive_letters_say_it(family: str, vcpus: int, letters: str, middle: str, version: int) -> None:
    assert not parsed(f"{family}{vcpus}{letters}_{middle}_v{version}").rdma
    assert parsed(f"{family}{vcpus}{letters}r_{middle}_v{version}").sr_iov


# Name: GPUs, model, GB of one, vCPUs, GiB, HCAs, Gb/s of one, usable. From Microsoft's pages, apart from the table.
SIZES = """
NC6                       1 K80     12   6   56 0   0 -
NC12                      2 K80     12  12  112 0   0 -
NC24                      4 K80     12  24  224 0   0 -
NC24r                     4 K80     12  24  224 1  56 no
NC6_Promo                 1 K80     12   6   56 0   0 -
NC12_Promo                2 K80     12  12  112 0   0 -
NC24_Promo                4 K80     12  24  224 0   0 -
NC24r_Promo               4 K80     12  24  224 1  56 no
ND6s                      1 P40     24   6  112 0   0 -
ND12s                     2 P40     24  12  224 0   0 -
ND24s                     4 P40     24  24  448 0   0 -
ND24rs                    4 P40     24  24  448 1  56 no
NC6s_v2                   1 P100    16   6  112 0   0 -
NC12s_v2                  2 P100    16  12  224 0   0 -
NC24s_v2                  4 P100    16  24  448 0   0 -
NC24rs_v2                 4 P100    16  24  448 1  56 no
NC6s_v3                   1 V100    16   6  112 0   0 -
NC12s_v3                  2 V100    16  12  224 0   0 -
NC24s_v3                  4 V100    16  24  448 0   0 -
NC24rs_v3                 4 V100    16  24  448 1  56 yes
ND40rs_v2                 8 V100    32  40  672 1 100 yes
NC4as_T4_v3               1 T4      16   4   28 0   0 -
NC8as_T4_v3               1 T4      16   8   56 0   0 -
NC16as_T4_v3              1 T4      16  16  110 0   0 -
NC64as_T4_v3              4 T4      16  64  440 0   0 -
NC24ads_A100_v4           1 A100    80  24  220 0   0 -
NC48ads_A100_v4           2 A100    80  48  440 0   0 -
NC96ads_A100_v4           4 A100    80  96  880 0   0 -
ND96asr_v4                8 A100    40  96  900 8 200 yes
ND96amsr_A100_v4          8 A100    80  96 1900 8 200 yes
ND96asr_MI200_v4         16 MI250X   -  96    - 8 200 yes
NC40ads_H100_v5           1 H100    94  40  320 0   0 -
NC80adis_H100_v5          2 H100    94  80  640 0   0 -
ND96isr_H100_v5           8 H100    80  96 1900 8 400 yes
ND96is_H100_v5            8 H100    80  96 1900 0   0 -
ND96isr_H200_v5           8 H200   141  96 1850 8 400 yes
ND96isrf_H200_v5          8 H200   141  96 1850 8 400 yes
ND96is_H200_v5            8 H200   141  96 1850 0   0 -
ND96isr_MI300X_v5         8 MI300X 192  96 1850 8 400 yes
ND128isr_NDR_GB200_v6     4 GB200  192 128  900 4 400 yes
ND128isr_GB300_v6         4 GB300  288 128  864 4 400 yes
ND128isrG5_GB300_v6       4 GB300  288 128  864 4 400 yes
"""
each_size = pytest.mark.parametrize("size", known_vm_sizes(), ids=lambda size: size.short_name)


def row(size: VMSize) -> str:
    usable = "-" if not size.hcas else "yes" if size.infiniband else "no"
    hardware = (size.gpus, size.gpu_model, size.gpu_memory_gb or "-", size.vcpus, size.memory_gib or "-")
    return " ".join(map(str, (size.name.removeprefix("Standard_"), *hardware, size.hcas, size.hca_gbps or 0, usable)))


def test_every_size_is_there_with_its_hardware() -> None:
    assert [row(size) for size in known_vm_sizes()] == [" ".join(line.split()) for line in SIZES.strip().splitlines()]


@each_size
def test_the_letters_of_a_name_agree_with_its_entry(size: VMSize) -> None:
    name = parse_vm_name(size.name)
    assert name is not None
    assert (name.rdma, name.sr_iov, name.vcpus) == (size.hcas != 0, size.infiniband, size.vcpus)
    assert name.model in (None, "MI200", size.gpu_model)


@each_size
def test_the_figures_of_an_entry_agree(size: VMSize) -> None:
    assert size.known
    assert size.source
    assert (size.hca_gbps is None) == (size.hcas == 0)
    assert size.infiniband or not (size.sr_iov or size.hca_expected_gbps or size.bus_bandwidth_two_nodes)
    assert (size.hca_expected_gbps or 0) < (size.hca_gbps or 1)
    assert size.gpus is not None
    assert size.gpus > 1 or (size.interconnect, size.bus_bandwidth) == ("PCIe", None)
    assert size.interconnect in ("PCIe", "NVLink in pairs", "Infinity Fabric") or re.fullmatch(
        "NVLink [2-5]", size.interconnect or ""
    )
    assert size.accelerator == ("amd" if (size.gpu_model or "").startswith("MI") else "nvidia")
    assert size.topology in (None, "ndv2", "ndv4", "ndv5", "ncv4")
    assert size.retired is None or datetime.date.fromisoformat(size.retired) < datetime.date(2026, 1, 1)


@each_size
def test_a_size_is_found_however_it_is_written(size: VMSize) -> None:
    for written in (size.name, size.name.upper(), size.short_name, f"\t{size.short_name.upper()} \n"):
        assert lookup_vm_size(written) is size


@pytest.mark.parametrize(
    ("name", "one_node", "two_nodes", "hca", "topology"),
    [
        ("nd40rs_v2", 110, 16.3, 78, "ndv2"),
        ("nd96asr_v4", 228, 180, 180, "ndv4"),
        ("nd96amsr_a100_v4", 228, 180, 180, "ndv4"),
        ("nd96isr_h100_v5", 460, 400, 380, "ndv5"),
        ("nd96is_h100_v5", 460, None, None, "ndv5"),
        ("nd96isr_h200_v5", 431, 400, 360, "ndv5"),
        ("nd96isrf_h200_v5", 432, 400, 360, "ndv5"),
        ("nd96is_h200_v5", 432, None, None, "ndv5"),
        ("nd96isr_mi300x_v5", 314, None, 390, None),
        ("nd96asr_mi200_v4", None, None, 175, None),
        ("nc96ads_a100_v4", 25, None, None, "ncv4"),
        ("nc48ads_a100_v4", 193, None, None, None),
        ("nc80adis_h100_v5", 208, None, None, None),
        ("nc24rs_v3", None, None, None, None),
        ("nd128isr_gb300_v6", None, 180, None, None),
    ],
)
def test_expected_bandwidth(
    name: str, one_node: float | None, two_nodes: float | None, hca: int | None, topology: str | None
) -> None:
    size = lookup_vm_size(name)
    found = (size.bus_bandwidth, size.bus_bandwidth_two_nodes, size.hca_expected_gbps, size.topology)
    assert found == (one_node, two_nodes, hca, topology)


@pytest.mark.parametrize(
    ("name", "gpus", "model", "accelerator", "infiniband"),
    [
        ("Standard_ND96isrf_H100_v5", None, "H100", "nvidia", True),
        ("ND96ams_A100_v4", None, "A100", "nvidia", False),
        ("nd96is_mi300x_v5", None, "MI300X", "amd", False),
        ("ND128isrf_NDR_GB200_v6", None, "GB200", "nvidia", True),
        ("Standard_NC144ds_xl_RTXPRO6000BSE_v6", None, "RTXPRO6000BSE", "nvidia", False),
        ("NG32adms_V620_v1", None, "V620", "amd", False),
        ("NV12s_v3", None, None, None, False),
        ("Standard_HB120rs_v3", 0, None, None, True),
        ("HC44rs", 0, None, None, True),
        ("A9", 0, None, None, False),
        ("D4s_v3", 0, None, None, False),
        ("NP10s", 0, None, None, False),
        ("NM16ads_MA35D", 0, None, None, False),
    ],
)
def test_other_sizes_are_judged_by_their_letters(
    name: str, gpus: int | None, model: str | None, accelerator: str | None, infiniband: bool
) -> None:
    size = lookup_vm_size(name)
    assert not size.known
    assert (size.gpus, size.gpu_model, size.accelerator, size.infiniband) == (gpus, model, accelerator, infiniband)
    assert size.bus_bandwidth is None
    assert size.short_name == name.lower().removeprefix("standard_")


def test_how_many_adapters_a_judged_size_has_is_not_guessed() -> None:
    assert lookup_vm_size("HB120rs_v3").hcas is None
    assert lookup_vm_size("D4s_v3").hcas == 0
    rdma_without_sr_iov = lookup_vm_size("A8")
    assert (rdma_without_sr_iov.hcas, rdma_without_sr_iov.sr_iov) == (None, False)


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("ND96isrH100v5", "Standard_ND96isr_H100_v5"),
        ("Standard ND96amsr A100 v4", "Standard_ND96amsr_A100_v4"),
        ("STANDARD-ND40RS-V2", "Standard_ND40rs_v2"),
        ("nc24rsv3", "Standard_NC24rs_v3"),
    ],
)
def test_a_typo_is_answered_with_the_nearest_size(typed: str, nearest: str) -> None:
    with pytest.raises(UnknownVMSize) as error:
        lookup_vm_size(typed)
    assert str(error.value) == f"{typed!r} is not the name of an Azure VM size; did you mean {nearest}?"


@pytest.mark.parametrize("typed", ["", "gpu", "H100", "my-compute-cluster"])
def test_what_resembles_nothing_is_answered_with_the_form(typed: str) -> None:
    with pytest.raises(UnknownVMSize, match="is not the name of an Azure VM size; a size is written like Standard_ND"):
        lookup_vm_size(typed)


def test_the_nearest_size_of_one_that_is_not_in_the_table() -> None:
    assert nearest_vm_size("Standard_ND96isrf_H100_v5") == "Standard_ND96isr_H100_v5"
    assert nearest_vm_size("???") is None


def test_a_lookup_imports_nothing_heavy() -> None:
    code = (
        "import sys, azureml_strategy.network.vm_sizes as sizes\n"
        "sizes.lookup_vm_size('nd96isr_h100_v5')\n"
        "print({'torch', 'lightning', 'mlflow', 'hydra', 'rich', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_table_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    size = lookup_vm_size("nd96isr_h100_v5")
    monkeypatch.delattr(vm_sizes.tomllib, "loads")
    assert lookup_vm_size("Standard_ND96isr_H100_v5") is size
