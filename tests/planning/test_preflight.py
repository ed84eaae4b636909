"""What a pre-flight counts is what real ranks hold, to the byte; and what it says is what the strategies say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.multiprocess.conftest import RunJob, _empty_store, run_job

from azureml_strategy.planning.preflight import Preflight, try_recipe

__all__ = ["_empty_store", "run_job"]  # fixtures
SCRIPT = Path(__file__).parent / "scripts" / "real_state.py"
GPT = ["data.batch_size=4"]
RESNET = ["data.batch_size=4"]
CASES = {
    "ddp": ("gpt_ddp", GPT),
    "zero_1": ("gpt_zero3", [*GPT, "strategy=deepspeed_stage_1"]),
    "zero_2": ("gpt_zero3", [*GPT, "strategy=deepspeed_stage_2"]),
    "zero_3": ("gpt_zero3", GPT),
    "zero_3_float32": ("gpt_zero3", [*GPT, "trainer.precision=32-true"]),
    "fsdp": ("gpt_tensor_parallel", [*GPT, "strategy.tensor_parallel_size=1"]),
    "tensor_parallel": ("gpt_tensor_parallel", [*GPT, "strategy.tensor_parallel_size=2"]),
    "pipeline": ("gpt_pipeline", GPT),
    "resnet_ddp": ("resnet50_ddp", RESNET),
    "resnet_zero_2": ("resnet50_ddp", [*RESNET, "strategy=deepspeed_stage_2", "model.channels_last=false"]),
    "resnet_pipeline": ("resnet50_pipeline", RESNET),
}
FEW = ("ddp", "zero_2", "zero_3", "tensor_parallel", "pipeline")


def held(preflight: Preflight) -> dict[int, dict[str, int]]:
    assert preflight.starts, preflight.lines()
    names = ("parameters", "gradients", "optimizer", "buffers")
    return {each.rank: {name: getattr(each, name) for name in names} for each in preflight.ranks}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (FEW, 2),
        pytest.param(tuple(CASES), 2, marks=pytest.mark.exhaustive),
        pytest.param(tuple(CASES), 4, marks=pytest.mark.exhaustive),
    ],
)
def test_counts_what_real_ranks_hold(run_job: RunJob, names: tuple[str, ...], ranks: int) -> None:
    job = run_job(SCRIPT, json.dumps([(name, *CASES[name]) for name in names]), processes_per_node=ranks)
    assert job.exit_code == 0, job.output
    for name in names:
        pretended = held(try_recipe(*CASES[name], nodes=1, gpus_per_node=ranks))
        real = {rank: dict(job.results[rank][name]) for rank in pretended}
        for rank, state in real.items():
            alive = state.pop("alive")
            assert sum(state.values()) - state["gradients"] <= alive, f"{name}: all tensors that are alive, {rank}"
        assert pretended == real, name
