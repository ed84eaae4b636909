"""One node in place of several: what is advised is as fast by `predict`, and nothing smaller is."""

from __future__ import annotations

import pytest

from azureml_strategy.gpus import gpu_of
from azureml_strategy.network.vm_sizes import VMSize, known_vm_sizes, lookup_vm_size
from azureml_strategy.planning import predict
from azureml_strategy.planning.scale_up import nodes_worth

OFFERED = [each for each in known_vm_sizes() if not each.retired]


def rate(size: VMSize, nodes: int) -> float:
    """Images per second of ResNet-50 in the precision of the GPU's tensor cores, by the documented function."""
    gpu = gpu_of(size)
    assert gpu is not None
    precision = "bf16-mixed" if "bf16" in gpu.peaks else "16-mixed" if "16" in gpu.peaks else "32-true"
    options = {"batch_size": 64, "vm_size": size.name, "nodes": nodes, "precision": precision, "optimizer": "sgd"}
    return predict("resnet50", **options).samples_per_second  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "nodes"), [("nc6s_v3", 8), ("nc24rs_v3", 4), ("nc24r", 4), ("nd40rs_v2", 2), ("nd96is_h100_v5", 4)]
)
def test_all_nodes_that_are_as_fast_and_no_others(name: str, nodes: int) -> None:
    size = lookup_vm_size(name)
    together = rate(size, nodes)
    amd = ("MI250X", "MI300X")
    alone = {each.name: rate(each, 1) for each in OFFERED if each.gpu_model not in amd and gpu_of(each) is not None}
    found = nodes_worth(size, nodes, OFFERED)
    faster = {one for one, speed in alone.items() if speed >= 1.1 * together}
    holding = {each.name for each in OFFERED if (each.gpu_memory_gb or 0) >= (size.gpu_memory_gb or 0)}
    assert {each.size.name for each in found} == faster & holding
    assert [each.speed_up for each in found] == pytest.approx(
        sorted(alone[each.size.name] / together for each in found)
    )


def test_a_v100_comes_before_k80s() -> None:
    """The reference architecture's chart: a V100 has the rate of several K80s."""
    sizes = [lookup_vm_size("Standard_NC6s_v3")]
    (found,) = nodes_worth(lookup_vm_size("Standard_NC6"), 8, sizes)
    assert found.size.gpus == 1
    assert found.speed_up > 1.5


def test_one_node_of_eight_v100s_comes_before_eight_of_one() -> None:
    (found,) = nodes_worth(lookup_vm_size("Standard_NC6s_v3"), 8, [lookup_vm_size("Standard_ND40rs_v2")])
    assert found.speed_up > 2  # eight V100 each, but gradients over Ethernet


def test_gpus_of_one_maker() -> None:
    sizes = [*OFFERED, *map(lookup_vm_size, ("nc6", "nd96asr_mi200_v4"))]
    for name, models in (("nc6", {"MI250X", "MI300X"}), ("nd96asr_mi200_v4", {"V100", "A100", "H100", "H200"})):
        found = nodes_worth(lookup_vm_size(name), 1, sizes)
        assert found
        assert not {each.size.gpu_model for each in found} & models - {lookup_vm_size(name).gpu_model}


@pytest.mark.parametrize("name", ["Standard_D4s_v3", "Standard_NC144ds_XYZ9_v7"])
def test_a_size_without_known_gpus_is_worth_nothing(name: str) -> None:
    assert nodes_worth(lookup_vm_size(name), 4, OFFERED) == []
