from __future__ import annotations

import re
from importlib.resources import files

import pytest
import yaml

from azureml_strategy.jobs.resources import check_nodes, compute_name, find_size, offered_sizes, scale_up_advice
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.network.vm_sizes import lookup_vm_size


def test_each_size_that_is_offered_has_a_file_and_no_other_has() -> None:
    group = files("azureml_strategy.conf").joinpath("cluster")
    shipped = {file.name.removesuffix(".yaml"): yaml.safe_load(file.read_text()) for file in group.iterdir()}
    assert shipped.pop("default")["vm_size"] is None
    assert {name: config["vm_size"] for name, config in shipped.items()} == {
        size.short_name: size.name for size in offered_sizes()
    }
    assert {"nd96isr_h100_v5", "nc24ads_a100_v4"} < shipped.keys()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Standard_NC24rs_v3", "was retired on 2025-09-30.* NC96ads_A100_v4|was retired"),
        ("nd24rs", "was retired on 2023-09-06"),
        ("nd96isr h100 v5", "did you mean Standard_ND96isr_H100_v5"),
        ("nd96isr_h100", "looks like Standard_ND96isr_H100_v5 without its generation. Type Standard_ND96isr_H100_v5."),
        ("Standard_NC24ads_A100", "looks like Standard_NC24ads_A100_v4 without"),
    ],
)
def test_sizes_that_cannot_be_had(name: str, words: str) -> None:
    with pytest.raises(JobError, match=words):
        find_size(name)


@pytest.mark.parametrize("name", ["Standard_ND96isr_H900_v9", "nd96isr_h100_v9", "Standard_D4s_v3", "Standard_NV6"])
def test_sizes_that_azure_may_know_are_let_through(name: str) -> None:
    assert find_size(name).name.lower().endswith(name.lower())


@pytest.mark.parametrize(
    ("name", "nodes", "words"),
    [
        (
            "nc24ads_a100_v4",
            4,
            r"has no InfiniBand.* Scale up .* Standard_ND96amsr_A100_v4 has 8 A100 .* confirm with X",
        ),
        ("nd96is_h100_v5", 2, r"has no InfiniBand.* With InfiniBand there is Standard_ND96isr_H100_v5"),
        ("nc64as_t4_v3", 2, r"Use one node"),
        ("Standard_NC144ds_XYZ9_v7", 2, r"has no InfiniBand"),
    ],
)
def test_several_nodes_without_infiniband_are_refused(name: str, nodes: int, words: str) -> None:
    size = find_size(name)
    with pytest.raises(JobError, match=words):
        check_nodes(size, nodes, allowed=False, option="X")
    check_nodes(size, nodes, allowed=True, option="X")
    check_nodes(size, 1, allowed=False, option="X")


@pytest.mark.parametrize("name", ["nd96isr_h100_v5", "nd96amsr_a100_v4", "nd40rs_v2", "Standard_D4s_v3"])
def test_several_nodes_with_infiniband_or_without_gpus_are_fine(name: str) -> None:
    check_nodes(find_size(name), 8, allowed=False, option="X")


def test_scaling_up_comes_before_scaling_out() -> None:
    advice = scale_up_advice(find_size("nc4as_t4_v3"), 4)
    assert advice is not None
    assert "Standard_NC64as_T4_v3 has 4 T4 GPUs" in advice
    assert scale_up_advice(find_size("nc4as_t4_v3"), 1) is None
    assert scale_up_advice(find_size("nd96isr_h100_v5"), 4) is None
    assert scale_up_advice(find_size("Standard_D4s_v3"), 4) is None


@pytest.mark.parametrize(
    ("name", "nodes", "words"),
    [
        ("nc6s_v3", 8, r"Standard_ND40rs_v2 has 8 V100 GPUs in one node.* of one Standard_ND40rs_v2 \(8 V100\) \d"),
        ("nc24r", 4, r"At ResNet-50 the planner expects of one Standard_\w+ \(\d (T4|V100|A100)\) \d\.\d times"),
        (
            "nd40rs_v2",
            2,
            r"expects of one Standard_ND96amsr_A100_v4 \(8 A100\) 1\.\d times the rate of 2 x",
        ),
        ("nd96is_h100_v5", 2, r"of one Standard_ND96isr_H200_v5 \(8 H200\)"),
    ],
)
def test_scaling_up_goes_across_models_of_gpus(name: str, nodes: int, words: str) -> None:
    advice = scale_up_advice(lookup_vm_size(name), nodes)
    assert advice is not None
    assert re.search(words, advice)
    assert "`plan` says whether your model fits" in advice


def test_a_compute_has_a_name_that_azure_takes() -> None:
    """Letters, digits and hyphens, 3 to 32, a letter first."""
    for size in offered_sizes():
        for tier in ("dedicated", "low_priority"):
            assert re.fullmatch(r"[a-z][a-z0-9-]{2,31}", compute_name(size, tier))
    assert compute_name(find_size("nd96isr_h100_v5"), "low_priority") == "nd96isr-h100-v5-low"
