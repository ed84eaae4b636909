"""The rate that is expected of a recipe's run, in the unit that the run measures."""

from __future__ import annotations

import pytest

from azureml_strategy.network.vm_sizes import lookup_vm_size
from azureml_strategy.planning import Distribution, PlanError, network_of_module, predict
from azureml_strategy.planning.expected import expect_rate, has_own_network
from azureml_strategy.planning.past_run import expect_run
from azureml_strategy.planning.workload import read_workload

H100 = lookup_vm_size("nd96isr_h100_v5")


def test_images_of_all_gpus_with_accumulation() -> None:
    """A step has 256 images a GPU, twice, on two nodes of eight; `predict` gives the rate of the same network."""
    overrides = ["data.batch_size=256", "trainer.accumulate_grad_batches=2", "compile=off"]
    found = expect_rate("resnet50_imagenet", overrides, H100, 2)
    workload = read_workload("resnet50_imagenet", overrides)
    network = network_of_module(workload.module, workload.make_batch(256), 256, "x")
    rate = predict(
        network,
        batch_size=256,
        vm_size=H100.name,
        nodes=2,
        optimizer="sgd",
        strategy=Distribution(accumulate=2),
        compiled=workload.compiled,
    )
    assert found.samples_per_second == pytest.approx(rate.samples_per_second)
    assert (found.low, found.high) == pytest.approx((rate.low, rate.high))
    assert found.samples_per_step == 2 * 256 * 16
    assert (found.unit, found.nodes, found.devices, found.gpu) == ("images", 2, 16, "H100")
    assert (found.strategy, found.precision) == ("AzureMLDDPStrategy", "bf16-mixed")
    assert found.place == "2 x Standard_ND96isr_H100_v5"


def test_tokens_not_sequences() -> None:
    found = expect_rate("gpt_ddp", ["model=gpt_125m", "data.batch_size=4", "data.sequence_length=1024"], H100, 1)
    assert found.unit == "tokens"
    assert found.samples_per_step == 4 * 1024 * 8
    assert found.samples_per_second > 100_000  # a GPU has some 10^5 tokens/s, and sequences would be a thousandth


def test_gpus_that_share_a_copy_read_one_batch() -> None:
    words = ["strategy.num_stages=4", "data.batch_size=8"]
    found = expect_rate("resnet50_pipeline", words, H100, 1)
    assert found.samples_per_step == 8 * 8 / 4
    assert found.strategy == "PipelineStrategy"


@pytest.mark.parametrize(
    ("recipe", "size", "says"),
    [
        ("gpt_diloco", H100.name, "diloco, is not planned"),
        ("finetune_lm", H100.name, "path"),
        ("resnet50_imagenet", "Standard_D4s_v3", "no GPU"),
        ("resnet50_imagenet", "Standard_NC144ds_XYZ9_v7", "no GPU"),
        ("resnet", H100.name, "no recipe"),
    ],
)
def test_what_cannot_be_expected_is_said(recipe: str, size: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        expect_rate(recipe, [], lookup_vm_size(size), 1)


@pytest.mark.parametrize(
    ("targets", "is_own"),
    [
        (["azureml_strategy.models.ImageClassifier", "azureml_strategy.models.ResNet50"], True),
        (["azureml_strategy.models.FineTuner"], False),
        (["azureml_strategy.models.ImageClassifier", "torchvision.models.resnet50"], False),
        (["mine.Model"], False),
        ([], False),
    ],
)
def test_only_a_network_of_this_package_is_built_unasked(targets: list[str], is_own: bool) -> None:
    assert has_own_network(targets) == is_own


TAGS = {
    "azureml_strategy.recipe": "resnet50_imagenet",
    "azureml_strategy.overrides": "cluster=nc96ads_a100_v4 data.batch_size=128",
    "azureml_strategy.vm_size": "Standard_NC96ads_A100_v4",
    "throughput.unit": "images",
}
PARAMS = {
    "model/_target_": "azureml_strategy.models.ImageClassifier",
    "model/network/_target_": "azureml_strategy.models.ResNet50",
    "strategy/_target_": "azureml_strategy.strategies.AzureMLDDPStrategy",
    "trainer/precision": "bf16-mixed",
}
METRICS = {"summary/nodes": 1.0, "summary/devices": 4.0, "summary/mfu": 0.2}


def test_a_run_that_is_over_is_planned_by_what_it_says_of_itself() -> None:
    found = expect_run(TAGS, PARAMS, METRICS)
    assert found == expect_rate(
        "resnet50_imagenet", ["data.batch_size=128"], lookup_vm_size("Standard_NC96ads_A100_v4"), 1
    )


@pytest.mark.parametrize(
    ("tags", "params", "metrics"),
    [
        ({"azureml_strategy.emulated": "true"}, {}, {}),
        ({"azureml_strategy.recipe": "runs/gone"}, {}, {}),
        ({"azureml_strategy.overrides": "data.nothing=3 'unclosed"}, {}, {}),
        ({"azureml_strategy.overrides": "data.nothing=3"}, {}, {}),
        ({"azureml_strategy.vm_size": "Standard_ND96isr_H900_v9"}, {}, {}),
        ({"throughput.unit": "samples"}, {}, {}),
        ({}, {"model/network/_target_": "mine.Network"}, {}),
        ({}, {"strategy/_target_": "azureml_strategy.strategies.PipelineStrategy"}, {}),
        ({}, {}, {"summary/devices": 2.0}),
        ({}, {}, {"summary/devices": 0.0}),
        ({}, {}, {"summary/nodes": -1.0}),
    ],
)
def test_a_run_that_cannot_be_planned_has_no_expectation(
    tags: dict[str, str], params: dict[str, str], metrics: dict[str, float]
) -> None:
    assert expect_run(TAGS | tags, PARAMS | params, METRICS | metrics) is None
