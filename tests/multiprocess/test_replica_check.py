"""Ranks that have come apart are named with what differs; ranks that may differ, and equal ones, are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tests.multiprocess.conftest import RunJob

# strategy: what is found when one rank changes it before step 3, right after an average of local SGD. Buffers are made
# equal again but by stock DDP without it; parts of FSDP2 are each rank's own.
FOUND = {
    "ddp": {"parameter", "learning rate", "scheduler"},
    "stock ddp": {"parameter", "buffer", "learning rate", "scheduler"},
    "zero 1": {"parameter", "learning rate", "scheduler"},
    "zero 2": {"parameter", "learning rate", "scheduler"},
    "zero 3": {"parameter", "learning rate", "scheduler"},
    "fsdp2": {"learning rate", "scheduler"},
    "tensor parallel": {"parameter", "learning rate", "scheduler"},
    "pipeline": {"parameter", "learning rate", "scheduler"},
    "local sgd": {"parameter", "learning rate", "scheduler"},
}


@pytest.mark.parametrize("strategy", FOUND)
def test_what_differs_is_named(run_job: RunJob, strategy: str) -> None:
    job = run_job("apart_copies.py", strategy, processes_per_node=2)
    assert job.exit_code == 0, job.output
    said = job.results[0]
    assert said["nothing"] == []
    assert not any(job.results[1].values()), "rank 0 speaks for all"
    assert {what for what, lines in said.items() if lines} == FOUND[strategy], "\n".join(map(str, said.items()))
    for line in said["learning rate"]:
        assert "on rank 1 these are others than on rank 0" in line
    assert any("lr of group 0 of optimizer 0" in line for line in said["learning rate"])


def test_it_looks_after_the_steps_that_it_names(run_job: RunJob) -> None:
    job = run_job("looks.py", processes_per_node=2)
    assert job.exit_code == 0, job.output
    for looks in job.results.values():
        assert looks["long"] == [0, 2, 48, 96, 128, 130]  # and not twice where the only epoch is also the last
        assert looks["epochs"] == [0, 2, 5, 15]
        assert looks["accumulated"] == [0, 2, 20]
        assert looks["two_steps"] == [0, 2, 48, 50]


# strategy: the ranks that name what does not train. Those of DeepSpeed each see their slices, or their stage.
STAYING = {
    "ddp": {"second group": [0], "not in the optimizer": [0]},
    "fsdp2": {"second group": [0], "not in the optimizer": [0]},
    "zero 1": {"remembered": [0, 1], "second group": [0, 1], "not in the optimizer": [0, 1]},
    "zero 2, offload": {"remembered": [0, 1], "second group": [0, 1], "not in the optimizer": [0, 1]},
    "zero 3": {"remembered": [0, 1], "second group": [0, 1], "not in the optimizer": [0, 1]},
    "zero 3, bf16": {"remembered": [0, 1], "second group": [0, 1], "not in the optimizer": [0, 1]},
    "pipeline": {"put back": [1], "not in the optimizer": [0, 1]},
    "pipeline, bf16": {"not in the optimizer": [0, 1]},
}


@pytest.mark.parametrize(
    "strategy",
    [
        name if name in ("zero 1", "zero 3", "pipeline") else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in STAYING
    ],
)
def test_what_does_not_train_is_named_by_the_ranks_that_see_it(run_job: RunJob, strategy: str) -> None:
    job = run_job("stays.py", strategy, processes_per_node=2)
    assert job.exit_code == 0, job.output
    cases = job.results[0].keys()
    found = {case: [rank for rank in (0, 1) if job.results[rank][case]] for case in cases}
    assert {case: ranks for case, ranks in found.items() if ranks} == STAYING[strategy], job.results
    assert all("network.0" not in line for each in job.results.values() for line in each.get("second group", []))


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_the_recipes_models_are_not_accused(run_job: RunJob, tmp_path: Path, ranks: int) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    job = run_job("recipes_unaccused.py", tmp_path / "llama", processes_per_node=ranks)
    assert job.exit_code == 0, job.output
    found = job.results[0]
    assert {case: lines for case, lines in found["said"].items() if lines} == {}
    assert set(found["steps"].values()) == {6}
