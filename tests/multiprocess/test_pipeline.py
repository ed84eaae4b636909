"""A pipeline of real processes: the numbers of one process, and what Lightning shows of them on every rank."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
from tests.multiprocess.conftest import Job, RunJob, chosen

# float32 sums in another order, over 6 optimizer steps
LOSSES, WEIGHTS = {"rel": 1e-5}, {"rel": 1e-4, "abs": 1e-5}


def mean_losses(job: Job, name: str, ranks: tuple[int, ...]) -> list[float]:
    return [sum(each) / len(each) for each in zip(*(job.results[rank][name]["losses"] for rank in ranks), strict=True)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", ["one of each kind", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_pipelines_give_the_numbers_of_one_process(run_job: RunJob, tmp_path: Path, cases: str) -> None:
    oracle = run_job("pipeline.py", "one_process", cases)
    assert oracle.exit_code == 0, oracle.output
    two = run_job("pipeline.py", "two_processes", cases, nodes=2)
    assert two.exit_code == 0, two.output
    check_two_stages(cases, two, oracle.results[0], tmp_path)
    four = run_job("pipeline.py", "four_processes", cases, nodes=2, processes_per_node=2)
    assert four.exit_code == 0, four.output
    check_two_replicas(cases, four, oracle.results[0]["plain"])


def check_two_stages(cases: str, job: Job, oracle: dict[str, Any], folder: Path) -> None:
    first, last = job.results[0], job.results[1]
    check_numbers(cases, job, oracle)
    check_logs(first, last, oracle, folder)
    check_hooks(first)
    check_memory(first, last, oracle)
    check_evaluation(first, last)
    check_refusals(first["refused"])
    assert first["refused"] == last["refused"]
    # the second epoch alone, from the checkpoint of the first: the same to the last bit
    assert first["pipeline again"]["losses"] == first["pipeline"]["losses"][3:]
    assert (first["stopped"]["epochs"], last["stopped"]["epochs"]) == (2, 2)
    assert first["pipeline"]["best"] == last["pipeline"]["best"] == oracle["plain"]["best"]
    assert first["max_steps"] == 5


def check_numbers(cases: str, job: Job, oracle: dict[str, Any]) -> None:
    """Clipping, a schedule by step and tied embeddings in all of them; by epoch and untied in one."""
    plain = oracle["plain"]
    assert len(plain["losses"]) == 6
    assert sum(plain["losses"][-2:]) < 0.95 * sum(plain["losses"][:2])
    assert mean_losses(job, "ddp", (0, 1)) == pytest.approx(plain["losses"], **LOSSES)
    check_one_stage(cases, oracle)
    first, last = job.results[0], job.results[1]
    for name in chosen(cases, ("pipeline", "by kind"), ("zero",)):
        assert first[name]["losses"] == pytest.approx(plain["losses"], **LOSSES), name
        assert first[name]["losses"] == last[name]["losses"], name
        assert first[name]["weights"] == pytest.approx(plain["weights"], **WEIGHTS), name
        assert sorted(first[name]["read"]) == sorted(plain["read"]), name
        assert first[name]["read"] == last[name]["read"], name
    assert first["by epoch"]["losses"] == pytest.approx(oracle["by epoch"]["losses"], **LOSSES)
    assert first["by epoch"]["weights"] == pytest.approx(oracle["by epoch"]["weights"], **WEIGHTS)
    assert first["chain"] == pytest.approx(oracle["chain"], **LOSSES)
    # bfloat16 has 8 bits: 2**-8 = 0.4 %
    assert first["bf16"]["losses"] == pytest.approx(plain["losses"], rel=4e-3)
    assert first["bf16"]["losses"] != first["pipeline"]["losses"]


def check_one_stage(cases: str, oracle: dict[str, Any]) -> None:
    """A pipeline of one process, which has one stage unless told otherwise."""
    plain = oracle["plain"]
    for name in chosen(cases, ("one stage",), ("one stage, zero",)):
        assert oracle[name]["losses"] == pytest.approx(plain["losses"], **LOSSES), name
        assert oracle[name]["weights"] == pytest.approx(plain["weights"], **WEIGHTS), name
    assert oracle["one stage again"]["losses"] == oracle["one stage"]["losses"][3:]
    if cases == "all":
        assert oracle["one stage, bf16"]["losses"] == pytest.approx(plain["losses"], rel=4e-3)
    by_epoch, alone = oracle["one stage, by epoch"], oracle["by epoch"]
    assert by_epoch["losses"] == pytest.approx(alone["losses"], **LOSSES)
    shared = {metric: by_epoch["metrics"][metric] for metric in alone["metrics"]}
    assert shared == pytest.approx(alone["metrics"], **LOSSES)


def check_logs(first: dict[str, Any], last: dict[str, Any], oracle: dict[str, Any], folder: Path) -> None:
    """What the last stage logs is on all ranks what one process would have logged, and in rank 0's file."""
    for name, alone in (("pipeline", "plain"), ("by epoch", "by epoch")):
        metrics = first[name]["metrics"]
        assert metrics == last[name]["metrics"], name
        shared = {metric: metrics[metric] for metric in oracle[alone]["metrics"]}
        assert shared == pytest.approx(oracle[alone]["metrics"], **LOSSES), name
    assert {"hits_step", "hits_epoch", "best", "val/loss"} < first["by epoch"]["metrics"].keys()
    times = first["pipeline"]["metrics"]
    assert times["pipeline/bubble_formula"] == pytest.approx(1 / 5)
    assert 0 < times["pipeline/bubble"] < 1
    assert times["pipeline/stage_0_work_s"] > 0
    (file,) = (folder / "logs").rglob("metrics.csv")
    with file.open() as rows:
        hits = [float(row["hits_step"]) for row in csv.DictReader(rows) if row["hits_step"]]
    assert len(hits) == 2  # every third step
    assert hits[-1] == first["by epoch"]["metrics"]["hits_step"]


def check_hooks(first: dict[str, Any]) -> None:
    assert first["pipeline"]["hooks"] == ["after_backward", "before_optimizer_step"] * 6
    assert first["pipeline"]["global_steps"] == list(range(1, 7))


def check_memory(first: dict[str, Any], last: dict[str, Any], oracle: dict[str, Any]) -> None:
    """Parameters, gradients and AdamW's two states: half of them on each stage, the tied embedding on both."""
    embedding = 4 * 4 * 64 * 64  # bytes, numbers kept of each parameter, tokens, width
    for stage in (first, last):
        assert stage["wide"]["bytes"] <= 1.1 / 2 * oracle["wide"]["bytes"] + embedding
    by_stage = [stage["by epoch"]["gradient_norms"] for stage in (first, last)]
    norms = [math.hypot(*both) for both in zip(*by_stage, strict=True)]
    assert norms == pytest.approx(oracle["by epoch"]["gradient_norms"], **LOSSES)


def check_evaluation(first: dict[str, Any], last: dict[str, Any]) -> None:
    evaluated = first["evaluated"]
    assert evaluated == last["evaluated"]
    assert evaluated["after fit"]["test/loss"] == evaluated["validated"]["val/loss"]
    assert evaluated["bf16"]["test/loss"] == pytest.approx(first["bf16"]["metrics"]["val/loss"], **LOSSES)
    assert evaluated["from checkpoint"]["test/loss"] == first["pipeline"]["metrics"]["val/loss"]


def check_refusals(refused: dict[str, str]) -> None:
    words = {
        "stages": ("num_stages=3", "2 processes"),
        "batch": ("16 samples", "micro_batches=3", "15 or 18"),
        "last batch": ("42 samples", "10 samples", "drop_last=True"),
        "accumulation": ("accumulate_grad_batches=2", "micro_batches"),
        "fp16": ("16-mixed", "bf16-mixed"),
        "kind": ("type:attention", "block, embedding"),
        "layout": ("cut at layers [2]", "cut at layers [3]", "consolidate"),
        "other module": ("layers.5", "arguments it was trained with"),
    }
    for case, expected in words.items():
        for word in expected:
            assert word in refused[case], case


def check_two_replicas(cases: str, job: Job, plain: dict[str, Any]) -> None:
    for name in ("plain", "zero"):
        ranks = [job.results[rank][name] for rank in range(4)]
        # ranks 0 and 1 are the first stages of two replicas, 2 and 3 their last ones
        assert mean_losses(job, name, (0, 1)) == pytest.approx(plain["losses"], **LOSSES), name
        assert ranks[0]["weights"] == pytest.approx(plain["weights"], **WEIGHTS), name
        assert (ranks[0]["read"], ranks[1]["read"]) == (ranks[2]["read"], ranks[3]["read"]), name
        assert sorted(ranks[0]["read"] + ranks[1]["read"]) == sorted(plain["read"]), name
        val_losses = [rank["metrics"]["val/loss"] for rank in ranks]
        assert val_losses == pytest.approx([plain["metrics"]["val/loss"]] * 4, **LOSSES), name
    assert len({rank["uneven"] for rank in job.results.values()}) == 1
    assert all(job.results[rank]["zero"]["bytes"] < job.results[rank]["plain"]["bytes"] for rank in range(4))
    if cases == "all":
        assert mean_losses(job, "four stages", (0, 3)) == pytest.approx(plain["losses"], **LOSSES)
        assert job.results[0]["four stages"]["weights"] == pytest.approx(plain["weights"], **WEIGHTS)
