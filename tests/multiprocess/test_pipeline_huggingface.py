"""Transformers models that know nothing of stages, in a pipeline of real processes: the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
from tests.multiprocess.conftest import RunJob

pytest.importorskip("transformers")

FAMILIES = ("llama", "qwen3", "gemma3_text", "mistral", "gpt2")
VARIANTS = ("in_init", "weighted", "own_head", "classifier")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "families",
    [
        pytest.param(("gemma3_text", "gpt2"), id="one of each kind"),  # the modules below are of the others
        pytest.param(FAMILIES, id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_two_stages_give_the_numbers_of_transformers_alone(run_job: RunJob, families: tuple[str, ...]) -> None:
    job = run_job("pipeline_huggingface.py", "two_processes", *families, nodes=2)
    assert job.exit_code == 0, job.output
    first, last = job.results[0], job.results[1]
    both = {**first, **last}
    for name in (*families, *VARIANTS):
        check(first[name], last[name], both[f"{name} alone"], name)
    for family in families:
        assert sum(both[f"{family} consolidated"]) / 2 == pytest.approx(first[family]["val"], rel=1e-6), family
    half = len(first["gpt2"]["losses"]) // 2
    assert first["again"]["losses"] == first["gpt2"]["losses"][half:]
    for stage in (first, last):
        assert stage["loaded"]["losses"] == stage["gemma3_text"]["losses"][:half]
        assert stage["loaded"]["parameters"] == stage["gemma3_text"]["parameters"]
    assert first["recomputed"]["losses"] == pytest.approx(both["gemma3_text alone"]["losses"][:half], rel=1e-5)
    # bfloat16 has 8 bits: 2**-8 = 0.4 %, more after steps
    bf16, whole = first["bf16"]["losses"], both["gemma3_text alone"]["losses"][:half]
    assert bf16[0] == pytest.approx(whole[0], rel=4e-3)
    assert bf16 == pytest.approx(whole, rel=1.5e-2)
    once, again, whole = first["validated"]
    assert once == again == pytest.approx(whole, rel=1e-5)
    assert "output_hidden_states=True" in first["refused"]
    assert first["refused"] == last["refused"]


def check(first: dict[str, Any], last: dict[str, Any], alone: dict[str, Any], name: str) -> None:
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-5), name
    assert first["losses"] == last["losses"], name
    assert len(first["losses"]) in (5, 10), name
    if name in FAMILIES:
        assert first["val"] == last["val"] == pytest.approx(alone["val"], rel=1e-5), name
    # no process holds the whole model
    assert max(first["parameters"], last["parameters"]) < 0.8 * alone["parameters"], name


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_two_stages_of_two_replicas(run_job: RunJob) -> None:
    job = run_job("pipeline_huggingface.py", "four_processes", nodes=2, processes_per_node=2)
    assert job.exit_code == 0, job.output
    both = {**job.results[0], **job.results[1]}
    for name in ("gemma3_text", "weighted"):
        first, second = (job.results[rank][name]["losses"] for rank in (0, 1))
        losses = [(one + other) / 2 for one, other in zip(first, second, strict=True)]
        assert losses == pytest.approx(both[f"{name} alone"]["losses"], rel=1e-5), name
        assert first != second, name
    values = [job.results[rank]["gemma3_text"]["val"] for rank in range(4)]
    assert values == pytest.approx([both["gemma3_text alone"]["val"]] * 4, rel=1e-5)
