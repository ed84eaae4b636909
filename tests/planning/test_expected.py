"""The rate that is expected of a recipe's run, in the unit that the run measures."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import pytest

from azureml_strategy.network.vm_sizes import lookup_vm_size
from azureml_strategy.planning import Distribution, PlanError, network_of_module, predict
from azureml_strategy.planning.expected import expect_rate
from azureml_strategy.planning.past_run import expect_run
from azureml_strategy.planning.workload import read_workload

H100 = lookup_vm_size("nd96isr_h100_v5")


def test_images_of_all_gpus_with_accumulation() -> None:
    """A step has 256 images a GPU, twice, on two nodes of eight; `predict` gives the rate of the same network."""
    overrides = ["data.batch_size=256", "trainer.accumulate_grad_batches=2", "compile=off"]
    found = expect_rate("resnet50_imagenet", overrides, H100, 2)
    workload = read_workload("resnet50_imagenet", overrides)
    network = network_of_module(workload.module, workload.make_batch(8), 8, "x")
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
    words = ["strategy.num_stages=4", "data.batch_size=32"]
    found = expect_rate("resnet50_pipeline", words, H100, 1)
    assert found.samples_per_step == 32 * 8 / 4
    assert found.strategy == "PipelineStrategy"


@pytest.mark.parametrize(
    ("recipe", "size", "says"),
    [
        ("gpt_diloco", H100.name, "diloco, is not planned"),
        ("finetune_lm", H100.name, "FineTuner, which is not made"),
        ("resnet50_imagenet", "Standard_D4s_v3", "no GPU"),
        ("resnet50_imagenet", "Standard_NC144ds_XYZ9_v7", "no GPU"),
        ("resnet", H100.name, "no recipe"),
    ],
)
def test_what_cannot_be_expected_is_said(recipe: str, size: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        expect_rate(recipe, [], lookup_vm_size(size), 1)


PUT_TOGETHER = (
    "+vars.a=_tar",
    "+vars.b=get_",
    "+vars.d='{${vars.a}${vars.b}: os.mkdir, path: it_ran}'",
    "++model.warmup_epochs=${oc.create:${oc.decode:${vars.d}}}",
)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.network._target_=mine.Net"],
        ["data._target_=mine.Data"],
        ["model.network=${net}", "+net._target_=mine.Net"],
        PUT_TOGETHER,
        ["model=finetune_lm"],
    ],
)
def test_no_code_but_ours_runs(overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tag of a store may hold any override, and `submit` makes nothing of the user's."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("import os, sys\nos.mkdir('it_ran')\nsys.exit(1)\n")
    with pytest.raises(PlanError):
        expect_rate("resnet50_imagenet", overrides, H100, 1)
    tags = TAGS | {"azureml_strategy.overrides": shlex.join(overrides)}
    assert expect_run(tags, PARAMS, METRICS) is None
    assert not Path("it_ran").exists()


@pytest.mark.parametrize(
    ("recipe", "size"), [("gpt_tensor_parallel", 8), ("gpt_pipeline", 2), ("resnet50_pipeline", 2)]
)
def test_auto_is_what_the_strategy_makes_of_it(recipe: str, size: int) -> None:
    """A batch is that of the GPUs that hold one copy of the network together."""
    workload = read_workload(recipe, ["data.batch_size=64"])
    assert expect_rate(recipe, ["data.batch_size=64"], H100, 2).samples_per_step == 64 * 16 / size * workload.per_sample


@pytest.mark.parametrize(
    ("recipe", "override"),
    [
        ("gpt_zero3", "strategy.offload_optimizer=true"),
        ("resnet50_imagenet", "trainer.detect_anomaly=true"),
        ("resnet50_imagenet", "data.batch_size=8"),
        ("resnet50_imagenet", "strategy._target_=mine.Fast"),
    ],
)
def test_what_the_planner_does_not_count_is_not_held_against_a_run(recipe: str, override: str) -> None:
    with pytest.raises(PlanError):
        expect_rate(recipe, [override], H100, 1)


def test_the_time_of_a_plan_does_not_grow_with_the_batch() -> None:
    small, large = (read_workload("gpt_ddp", [f"data.batch_size={size}"]) for size in (8, 10**9))
    assert len(small.network.operators.listed) == len(large.network.operators.listed)


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
        ({"azureml_strategy.overrides": "'a b=c' ==="}, {}, {}),
        ({}, {"strategy/_target_": "azureml_strategy.strategies.PipelineStrategy"}, {}),
        ({}, {}, {"summary/devices": 2.0}),
        ({}, {}, {"summary/devices": 0.0}),
        ({}, {}, {"summary/nodes": -1.0}),
        ({}, {}, {"summary/nodes": math.inf}),
        ({}, {}, {"summary/devices": math.inf}),
    ],
)
def test_a_run_that_cannot_be_planned_has_no_expectation(
    tags: dict[str, str], params: dict[str, str], metrics: dict[str, float]
) -> None:
    assert expect_run(TAGS | tags, PARAMS | params, METRICS | metrics) is None
