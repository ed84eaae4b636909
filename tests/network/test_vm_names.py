"""What the names of VM sizes say, and which texts are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.network.vm_names import VMName, bare_name, parse_vm_name


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
