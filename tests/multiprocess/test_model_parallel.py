"""azureml_model_parallel: the losses of one process, however layers are cut and parameters sharded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.multiprocess.conftest import SCRIPTS, Job, RunJob, chosen
from torch.utils.data import DistributedSampler

from azureml_strategy.checkpoint.consolidate import consolidate

CASES = pytest.mark.parametrize("cases", ["one of each kind", pytest.param("all", marks=pytest.mark.exhaustive)])
EPOCH = 3  # steps


def one_process() -> tuple[list[float], list[float], Any]:
    """A bare loop over the same rows with torch alone: losses, parameters after it, and the model."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        from model_parallel import GLOBAL_BATCH, Transformer, rows
    finally:
        sys.path.remove(str(SCRIPTS))
    model, losses, order = Transformer(), [], []
    configured = model.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    sampler = DistributedSampler(rows(), num_replicas=1, rank=0, seed=0)  # the order that Lightning shuffles into
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order += list(sampler)
    for batch in rows()[order].split(GLOBAL_BATCH):
        loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist(), model


def assert_agrees(result: dict[str, Any], losses: list[float], parameters: list[float]) -> None:
    assert len(result["losses"]) == 2 * EPOCH
    assert result["losses"] == pytest.approx(losses, rel=1e-5)
    assert result["parameters"] == pytest.approx(parameters, abs=1e-4)


def assert_equal_on_all_ranks(job: Job, *names: str) -> None:
    for name in names:
        first, *others = (result["parameters"] for result in job.each(name))
        assert all(other == first for other in others), name


@CASES
def test_two_ranks(run_job: RunJob, tmp_path: Path, cases: str) -> None:
    job = run_job("model_parallel.py", "two_ranks", tmp_path, cases, processes_per_node=2)
    assert job.exit_code == 0, job.output
    results = job.results[0]
    losses, parameters, model = one_process()
    assert losses[-1] < losses[0]
    for name in chosen(cases, ("ddp", "fsdp", "tensor", "file"), ("activation_checkpointing",)):
        assert_agrees(results[name], losses, parameters)
        assert results[name]["val_loss"] == pytest.approx(results["ddp"]["val_loss"], rel=1e-5), name
    assert_equal_on_all_ranks(job, *chosen(cases, ("fsdp", "tensor", "bf16_tensor"), ("activation_checkpointing",)))
    for name in chosen(cases, ("fsdp", "tensor"), ("file",)):
        assert_resumes_exactly(results[name], results[f"{name}_resumed"], name)
    for name in ("from_ddp", "to_ddp"):
        assert results[name]["losses"] == pytest.approx(losses[EPOCH:], rel=1e-5), name
    assert_bfloat16(results, chosen(cases, ("bf16_tensor",), ("bf16",)))
    assert (results["fsdp"]["replicas"], results["tensor"]["replicas"]) == (2, 1)
    validated_by_ddp, validated = (one[0] for one in results["validated"])
    assert validated == pytest.approx(validated_by_ddp, rel=1e-5)
    assert job.results[1]["noisy"]["seen"] == results["noisy"]["seen"]
    assert results["itself"] == results["itself_stock"]
    if cases == "all":
        assert results["accumulation"]["losses"] == pytest.approx(results["accumulation_ddp"]["losses"], rel=1e-5)
        assert_gpt(results["gpt"])
    assert_memory(job)
    assert_refused(results["refused"])
    assert_consolidates(tmp_path, model)
    alone = run_job("model_parallel.py", "resume_alone", tmp_path, cases, in_job=False)
    assert alone.exit_code == 0, alone.output
    assert alone.results[0]["alone"]["losses"] == pytest.approx(losses[EPOCH:], rel=1e-5)


def assert_one_process(results: dict[str, Any], losses: list[float], parameters: list[float]) -> None:
    for name in ("alone", "sizes", "file", "recomputing"):
        assert_agrees(results[name], losses, parameters)
    for name in ("alone", "file"):
        assert_resumes_exactly(results[name], results[f"{name}_resumed"], name)
    assert results["bf16"]["losses"] == pytest.approx(results["bf16_ddp"]["losses"], rel=2e-2)


def assert_resumes_exactly(result: dict[str, Any], resumed: dict[str, Any], name: str) -> None:
    assert resumed["losses"] == result["losses"][EPOCH:], f"{name}: not bit for bit"
    assert resumed["parameters"] == result["parameters"], name


def assert_bfloat16(results: dict[str, Any], names: list[str]) -> None:
    """Eight bits of mantissa: 0.4 % a rounding."""
    for name in names:
        assert results[name]["losses"] == pytest.approx(results["bf16_ddp"]["losses"], rel=2e-2), name
        assert results[name]["losses"] != results["bf16_ddp"]["losses"], name
    assert results["bf16_true"]["losses"] == pytest.approx(results["ddp"]["losses"], rel=5e-2)


def assert_gpt(runs: list[dict[str, Any]]) -> None:
    ddp, *others = (run["losses"] for run in runs)
    assert len(ddp) == 2 * EPOCH
    for losses in others:
        assert losses == pytest.approx(ddp, rel=1e-5)


def assert_memory(job: Job) -> None:
    for memory in job.each("memory"):
        assert memory["single"] / 2 <= memory["measured"] <= 1.1 / 2 * memory["single"] + memory["block"]


def assert_refused(refused: dict[str, str]) -> None:
    assert "NoPlan does not say how to cut its layers" in refused["no plan"]
    assert "the model has 5 heads" in refused["heads"]
    assert "matrix of 33 x 16, and 33 does not divide by 2" in refused["matrix"]
    assert "Resume with the sizes of the model" in refused["another model"]
    assert "is no distributed checkpoint: it holds nothing" in refused["another layout"]
    assert "Write compile='off', or leave out activation checkpointing." in refused["compiled"]


def assert_consolidates(folder: Path, model: Any) -> None:
    """The weights of every layout, under the names of the module on one process."""
    weights = {
        name: consolidate(folder / f"{name}.ckpt", folder / f"{name}.weights") for name in ("fsdp", "tensor", "file")
    }
    for name, one in weights.items():
        assert one.keys() == model.state_dict().keys(), name
        model.load_state_dict(one)
        torch.testing.assert_close(one, weights["fsdp"], rtol=0, atol=1e-4)


@CASES
def test_four_ranks(run_job: RunJob, tmp_path: Path, cases: str) -> None:
    alone = run_job("model_parallel.py", "save_alone", tmp_path, cases, in_job=False)
    assert alone.exit_code == 0, alone.output
    job = run_job("model_parallel.py", "four_ranks", tmp_path, cases, nodes=2, processes_per_node=2)
    assert job.exit_code == 0, job.output
    losses, parameters, _ = one_process()
    for result in (job.results[0]["both"], job.results[0]["ddp"]):
        assert_agrees(result, losses, parameters)
    assert_one_process(alone.results[0], losses, parameters)
    for name in chosen(cases, ("from_one",), ("as_fsdp",)):
        assert job.results[0][name]["losses"] == pytest.approx(losses[EPOCH:], rel=1e-5), name
    assert_equal_on_all_ranks(job, "both", "from_one")
    assert [result["replicas"] for result in job.each("both")] == [2, 2, 2, 2]
    if cases == "all":
        assert_gpt(job.results[0]["gpt"])
    seen = [result["seen"] for result in job.each("both")]
    assert seen[0] == seen[1] != seen[2] == seen[3]


def test_a_module_that_does_not_spread_itself_leaves_no_group_of_a_former_mesh(run_job: RunJob) -> None:
    """`auto` left both ranks to it, by a first mesh. Each group of NCCL's takes memory of the GPU."""
    job = run_job("settled.py", processes_per_node=2)
    assert job.exit_code == 0, job.output
    assert job.results[0] == job.results[1] == {"sizes": [2, 1], "sharded": True, "unused": 0}
