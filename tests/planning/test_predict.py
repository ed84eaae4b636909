"""Predicted rates beside published ones, and what cannot be predicted."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from azureml_strategy.models import ResNet50
from azureml_strategy.planning import (
    Distribution,
    MeasuredStep,
    PlanError,
    Prediction,
    named_network,
    network_of_module,
    predict,
)
from azureml_strategy.planning.fitted import default_parameters
from azureml_strategy.planning.kernels import kernels_of
from azureml_strategy.planning.steps import STRATEGIES, fill_buckets

_PUBLISHED = Path(__file__).parents[2] / "benchmarks/published/azure_resnet50_2018.csv"


def _published(network: str) -> list[tuple[dict[str, str], Prediction]]:
    lines = [line for line in _PUBLISHED.read_text().splitlines() if not line.startswith("#")]
    rows = [row for row in csv.DictReader(lines) if row["network"] == network]
    return [(row, _of_row(row)) for row in rows]


def _of_row(row: dict[str, str]) -> Prediction:
    return predict(
        "resnet50",
        batch_size=64,
        vm_size=row["vm_size"],
        nodes=int(row["gpus"]) // 4,
        precision="32-true",
        optimizer="sgd",
        interconnect=row["network"],  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("network", "middle", "worst"), [("infiniband", 0.015, 0.03), ("ethernet", 0.03, 0.07)])
def test_published_rates_of_azure_clusters(network: str, middle: float, worst: float) -> None:
    rows = _published(network)
    errors = [abs(found.samples_per_second / float(row["images_per_second"]) - 1) for row, found in rows]
    naive = [abs(found.naive / float(row["images_per_second"]) - 1) for row, found in rows]
    assert len(errors) == 12
    assert median(errors) <= middle
    assert max(errors) <= worst
    assert median(naive) > median(errors)


# docs/gpu.md: the loops by hand on one H100. The prediction knows older GPUs only.
@pytest.mark.parametrize(
    ("network", "batch", "compiled", "measured"),
    [
        ("resnet50", 256, False, 3931.0),
        ("resnet50", 256, True, 5530.0),
        ("gpt_125m", 16, True, 429_600 / 1024),
    ],
)
def test_one_h100_is_predicted_from_older_gpus(network: str, batch: int, compiled: bool, measured: float) -> None:
    optimizer = "sgd" if network == "resnet50" else "adam"
    found = predict(network, batch_size=batch, gpu="H100", compiled=compiled, optimizer=optimizer, anchored=False)
    assert found.samples_per_second == pytest.approx(measured, rel=0.2)
    assert found.low < measured < found.high


def test_one_gpu_exchanges_nothing() -> None:
    found = predict("resnet50", batch_size=64, gpu="A100")
    assert (found.communication_s, found.efficiency, found.gpus) == (0.0, 1.0, 1)
    assert found.naive == found.samples_per_second


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("nodes", [1, 4])
def test_every_strategy_is_predicted(strategy: Any, nodes: int) -> None:
    how = Distribution(strategy=strategy, num_stages=2 if strategy == "pipeline" else 1)
    found = predict("gpt_350m", batch_size=16, vm_size="ND96asr_v4", nodes=nodes, strategy=how)
    parts = found.compute_s + found.communication_s + found.bubble_s + found.data_s
    assert found.step_s == pytest.approx(parts)
    assert found.low < found.samples_per_second < found.high
    assert 0.3 < found.efficiency <= 1
    alone = predict("gpt_350m", batch_size=16, gpu="A100 40GB").samples_per_second
    assert found.samples_per_second < 1.05 * alone * found.gpus


def test_more_is_sent_in_more_time() -> None:
    def step_s(**how: Any) -> float:
        return predict(
            "gpt_350m", batch_size=4, vm_size="NC24ads_A100_v4", nodes=4, strategy=Distribution(**how)
        ).communication_s

    assert step_s(gradient_bytes=2) < step_s()
    many = predict("gpt_350m", batch_size=4, vm_size="NC24ads_A100_v4", nodes=4, strategy=Distribution(accumulate=8))
    assert many.communication_s < 8 * step_s()
    assert step_s(strategy="local_sgd", period=64) < step_s(strategy="local_sgd", period=4) < step_s()


def test_a_tiny_network_is_bound_by_launches() -> None:
    assert predict("resnet50", batch_size=1, gpu="H100").bound_by == "kernel launches"
    assert predict("resnet50", batch_size=256, gpu="H100").bound_by == "memory bandwidth"
    assert predict("gpt_7b", batch_size=4, gpu="H100").bound_by == "computation"


def test_slow_data_bounds_a_step() -> None:
    found = predict("resnet50", batch_size=256, gpu="H100", loader_rate=500)
    assert found.bound_by == "data"
    assert found.samples_per_second == pytest.approx(500)


def test_a_measured_step_is_kept_and_scaled() -> None:
    here = predict("resnet50", batch_size=256, gpu="A100", measured=MeasuredStep(0.1))
    assert here.samples_per_second == pytest.approx(2560, rel=1e-3)
    elsewhere = predict("resnet50", batch_size=256, gpu="H100", measured=MeasuredStep(0.1, "A100"))
    assert elsewhere.samples_per_second > 1.3 * here.samples_per_second
    accumulated = Distribution(accumulate=4)
    four = predict("resnet50", batch_size=256, gpu="A100", measured=MeasuredStep(0.1), strategy=accumulated)
    optimizer_s = 0.1 - (four.step_s - 0.1) / 3  # each further batch takes all but the optimizer
    assert 0 < optimizer_s < 0.01
    unknown = predict("resnet50", batch_size=8, precision="32-true", measured=MeasuredStep(1.7))
    assert unknown.samples_per_second == pytest.approx(8 / 1.7, rel=1e-3)


def test_a_measured_step_has_its_recomputation_once() -> None:
    how = Distribution(strategy="model_parallel", activation_checkpointing=True)
    with_it = predict("gpt_350m", batch_size=8, gpu="A100", strategy=how, measured=MeasuredStep(0.5, recomputes=True))
    assert with_it.step_s == pytest.approx(0.5)
    added = predict("gpt_350m", batch_size=8, gpu="A100", strategy=how, measured=MeasuredStep(0.5))
    assert added.step_s == pytest.approx(0.5 * 4 / 3, rel=0.1)  # a forward pass is a third
    off = predict("gpt_350m", batch_size=8, gpu="A100", measured=MeasuredStep(0.5, recomputes=True))
    assert off.step_s == pytest.approx(0.5 * 3 / 4, rel=0.1)


def test_a_launch_takes_as_long_on_another_gpu() -> None:
    """A step that waits for the host gains nothing by a faster GPU."""
    here = predict("resnet50", batch_size=1, gpu="A100", measured=MeasuredStep(0.02), anchored=False)
    there = predict("resnet50", batch_size=1, gpu="H100", measured=MeasuredStep(0.02, "A100"), anchored=False)
    assert (here.bound_by, there.bound_by) == ("kernel launches", "kernel launches")
    assert here.step_s == pytest.approx(0.02)
    assert there.step_s == pytest.approx(0.02, rel=0.05)


def test_each_micro_batch_launches_all_kernels() -> None:
    def step_s(pieces: int) -> float:
        how = Distribution(strategy="pipeline", num_stages=1, micro_batches=pieces)
        return predict("gpt_125m", batch_size=16, gpu="H100", strategy=how).compute_s

    launches = kernels_of(named_network("gpt_125m").operators, compiled=False).last.size
    assert step_s(16) >= 16 * launches * default_parameters().efficiency.host_s
    assert step_s(16) > 1.5 * step_s(1)
    assert step_s(1) == pytest.approx(predict("gpt_125m", batch_size=16, gpu="H100").compute_s)


def test_frozen_parameters_are_gathered_and_not_reduced() -> None:
    """Links so slow that nothing else counts: bytes by hand."""
    width = 1024
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(width, width, bias=False).requires_grad_(False), nn.Linear(width, 8, bias=False))
        for _ in range(4)
    )

    class Adapters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks.to("meta")

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            for frozen, adapter in self.blocks:  # type: ignore[misc]
                rows = frozen(rows) + adapter(rows).sum()
            return rows

    network = network_of_module(Adapters(), torch.empty(2, width, device="meta"), samples=2)
    found = {
        name: predict(network, batch_size=2, gpu="H100", gpus_per_node=8, inside_gb=1e-3, strategy=name)  # type: ignore[arg-type]
        for name in ("ddp", "deepspeed_stage_2", "deepspeed_stage_3")
    }
    elements, trained, share = 4 * (width * width + 8 * width), 4 * 8 * width, 7 / 8 / 1e6
    # Half precision: twice all parameters, and the trained ones' gradients; of ZeRO-2 these and their new values.
    assert found["deepspeed_stage_3"].communication_s == pytest.approx(share * 2 * (2 * elements + trained), rel=0.02)
    assert found["deepspeed_stage_2"].communication_s == pytest.approx(share * 2 * 2 * trained, rel=0.02)
    assert found["ddp"].communication_s == pytest.approx(share * 2 * 4 * trained, rel=0.02)


_PIPELINE = {"vm_size": "ND96asr_v4", "strategy": Distribution(strategy="pipeline", num_stages=2)}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "Name a GPU"),
        ({**_PIPELINE, "batch_size": 6}, "cannot cut a batch of 6 samples into micro_batches=4"),
        ({**_PIPELINE, "precision": "16-mixed"}, "does not compute in 16-mixed"),
        (
            _PIPELINE | {"strategy": Distribution(strategy="pipeline", num_stages=2, accumulate=2)},
            "takes no accumulate_grad_batches=2",
        ),
        ({"vm_size": "ND96asr_v4", "gpus_per_node": 9}, "gpus_per_node is 9, and Standard_ND96asr_v4 has 8"),
        ({"gpu": "H10"}, "No GPU is known as 'H10'"),
        ({"vm_size": "banana"}, "is not the name of an Azure VM size"),
        ({"vm_size": "Standard_D4s_v5"}, "The GPU of Standard_D4s_v5 is not known"),
        ({"gpu": "A100", "nodes": 2}, "need their links"),
        ({"gpu": "A100", "nodes": 0}, "nodes is 0"),
        ({"gpu": "A100", "batch_size": -1}, "batch_size is -1"),
        ({"gpu": "A100", "nodes": 2, "across_gb": -3.0}, "across_gb is -3"),
        ({"vm_size": "NC24ads_A100_v4", "nodes": 2, "interconnect": "infiniband"}, "has no InfiniBand"),
        ({"gpu": "A100", "batch_size": math.inf}, "batch_size is inf"),
        ({"gpu": "A100", "nodes": 1.5}, "whole number"),
        ({"gpu": "A100", "gpus_per_node": 0}, "gpus_per_node is 0"),
        ({"gpu": "A100", "precision": "8"}, "No speed is known of precision '8'"),
        ({"gpu": "A100", "loader_rate": -5}, "loader_rate is -5"),
        ({"gpu": "A100", "measured": MeasuredStep(math.nan)}, "measured.seconds is nan"),
        ({"gpu": "A100", "strategy": "foo"}, "No strategy is known as 'foo'"),
        (
            {"vm_size": "ND96asr_v4", "strategy": Distribution(strategy="model_parallel", tensor_parallel_size=8)},
            "blocks",
        ),
        ({"gpu": "A100", "optimizer": "lion"}, "No optimizer is known as 'lion'"),
        ({"vm_size": "NC24ads_A100_v4", "nodes": 3, "strategy": Distribution(strategy="pipeline", num_stages=2)}, "no"),
        (
            {"vm_size": "ND96asr_v4", "nodes": 8, "strategy": Distribution(strategy="pipeline", num_stages=64)},
            "as many parts",
        ),
    ],
)
def test_what_cannot_be_predicted_is_said(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        predict("resnet50", **{"batch_size": 8, **wrong})


def done_with(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What a single rank has to wait for."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"accumulate": -2}, "accumulate is -2"),
        ({"strategy": "ddp", "tensor_parallel_size": 2}, "is planned for model_parallel"),
    ],
)
def test_a_wrong_distribution_is_said_to_be(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Distribution(**wrong)


def test_more_memory_on_the_same_gpu_is_not_slower() -> None:
    for network in ("gpt_7b", "resnet50"):
        rates = [predict(network, batch_size=8, gpu=gpu).samples_per_second for gpu in ("H100", "H200")]
        assert rates[1] > rates[0]


@pytest.mark.parametrize(
    ("network", "blocks", "root", "messages"),
    [("gpt_125m", 124.476e6, 0, 14 * 4), ("resnet50", 23.499e6, 2.059e6, 16 * 4 + 3)],
)
def test_sharded_parameters_are_gathered_ahead_on_gpus_alone(
    network: str, blocks: float, root: float, messages: int
) -> None:
    """Without streams, under gloo, FSDP2 waits for all that it sends: the step is the sum of both."""
    links: dict[str, Any] = {"nodes": 2, "gpus_per_node": 1, "across_gb": 2, "inside_gb": 2, "gpu": "A100"}
    parameters = replace(default_parameters(), skew=0.0)
    case: dict[str, Any] = {"batch_size": 64, "strategy": "model_parallel", "parameters": parameters, **links}
    nccl, gloo = (predict(network, library=library, **case) for library in ("nccl", "gloo"))
    # Bytes of a parameter: in bf16 gathered twice, outside of the blocks once, and in float32 added up on both ranks.
    sent_s = (blocks * (2 + 2) + root * 2) / 2 / 2e9 + (blocks + root) * 4 / 2e9 + messages * 14e-6
    assert gloo.communication_s == pytest.approx(sent_s, rel=0.002)
    assert nccl.communication_s < 0.6 * gloo.communication_s


def test_stages_lie_across_nodes() -> None:
    """Replicas of a stage are neighbours: their gradients do not pass the slow network, the activations do."""
    how = Distribution(strategy="pipeline", num_stages=2, micro_batches=8)
    pipeline = predict("gpt_1b", batch_size=8, vm_size="NC96ads_A100_v4", nodes=2, strategy=how)
    ddp = predict("gpt_1b", batch_size=8, vm_size="NC96ads_A100_v4", nodes=2)
    assert pipeline.communication_s < ddp.communication_s


def test_buckets_are_filled_before_they_are_compressed() -> None:
    """DDP caps buckets by the gradients' own bytes: half as many bytes are sent at the same moments."""
    case: dict[str, Any] = {"batch_size": 8, "gpu": "A100", "nodes": 2, "gpus_per_node": 1, "inside_gb": 2}
    free = replace(default_parameters(), skew=0.0)
    full = predict("resnet50", across_gb=2, strategy=Distribution(), parameters=free, **case)
    half = predict("resnet50", across_gb=1, strategy=Distribution(gradient_bytes=2), parameters=free, **case)
    assert half.step_s == pytest.approx(full.step_s, rel=1e-3)
    one = predict("resnet50", across_gb=2, strategy=Distribution(bucket_mib=1000, first_bucket_mib=1000), **case)
    assert one.step_s > full.step_s, "a single bucket hides behind nothing"


def test_buckets_are_those_of_a_real_ddp(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = DistributedDataParallel(ResNet50())
        sizes: list[list[int]] = []

        def note(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are texts
            sizes[-1].append(bucket.buffer().nbytes)
            return done_with(bucket)

        model.register_comm_hook(None, note)
        for _ in range(2):  # buckets are made anew, in the order of the gradients, after the first step
            sizes.append([])
            model(torch.randn(2, 3, 32, 32)).sum().backward()
    finally:
        dist.destroy_process_group()
    gradients = [(4.0 * each.elements, float(each.after)) for each in named_network("resnet50").operators.gradients]
    buckets = fill_buckets(gradients, 25 * 2**20, 2**20)
    assert [size for size, _ in buckets] == sizes[-1]
    assert [at for _, at in buckets] == sorted(at for _, at in buckets)
