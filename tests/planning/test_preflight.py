"""What a pre-flight counts is what real ranks hold, to the byte; and what it says is what the strategies say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.multiprocess.conftest import RunJob, _empty_store, run_job

from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.layout import different_ranks
from azureml_strategy.planning.preflight import Preflight, try_recipe
from azureml_strategy.training.recipes import RecipeError

__all__ = ["_empty_store", "run_job"]  # fixtures
SCRIPT = Path(__file__).parent / "scripts" / "real_state.py"
GPT = ["data.batch_size=4"]
RESNET = ["data.batch_size=8"]
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
FEW = ("zero_2", "tensor_parallel")


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


@pytest.mark.exhaustive
def test_counts_what_is_written_by_hand() -> None:
    """ZeRO-2 in bfloat16: 2 bytes a parameter on each rank, and a 64th of float32 copies and Adam's two moments."""
    parameters, ranks = 824_448, 64  # a multiple of the 128 numbers to which DeepSpeed pads on 64 ranks: 6,441 times
    preflight = try_recipe("gpt_zero3", ["strategy=deepspeed_stage_2", "trainer.precision=bf16-mixed"], 8, 8)
    for state in held(preflight).values():
        assert state["parameters"] == 2 * parameters
        assert state["optimizer"] == 3 * 4 * parameters // ranks + 2 * 4, "with a step's counter for decayed and others"


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        (
            "gpt_tensor_parallel",
            ["strategy.tensor_parallel_size=3"],
            "tensor_parallel_size=3, but the model has 4 heads, which cannot be shared out equally.",
        ),
        pytest.param(
            "gpt_pipeline",
            ["data.batch_size=6"],
            "gives each replica 6 samples, which cannot be cut into micro_batches=4",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "gpt_pipeline",
            ["strategy.num_stages=7"],
            "num_stages=7 does not divide the 64 processes of this run.",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_says_what_the_strategies_say(recipe: str, overrides: list[str], message: str) -> None:
    preflight = try_recipe(recipe, overrides, nodes=8, gpus_per_node=6 if "tensor" in recipe else 8)
    assert not preflight.starts
    assert preflight.told, preflight.lines()
    assert message in preflight.problem


def test_a_data_set_that_is_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Batches have the shapes of the configuration; nothing is written where it runs."""
    monkeypatch.chdir(tmp_path)
    preflight = try_recipe("resnet50_imagenet", ["data.root=/nowhere/imagenet"], nodes=8, gpus_per_node=8)
    assert preflight.batch == [[256, 3, 224, 224], [256]]
    assert {state["parameters"] for state in held(preflight).values()} == {4 * 25_557_032}
    assert sum(preflight.buckets) == 4 * 25_557_032
    assert json.loads(json.dumps(preflight.as_dict()))["axes"] == {"data_parallel": 64}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_a_module_of_the_users_that_is_not_there_is_told() -> None:
    preflight = try_recipe("gpt_ddp", ["data._target_=my_data.Module"], nodes=1, gpus_per_node=2)
    assert not preflight.starts
    assert "my_data" in preflight.problem


def test_refuses_what_is_no_job() -> None:
    with pytest.raises(PlanError, match=r"0 node\(s\) x 8 process\(es\) is no job"):
        try_recipe("gpt_ddp", [], nodes=0, gpus_per_node=8)
    with pytest.raises(RecipeError, match="gpt_ddp"):
        try_recipe("gpt_dpp", [], nodes=1, gpus_per_node=8)


@pytest.mark.parametrize(
    ("axes", "ranks"),
    [
        ({"data_parallel": 64}, [0, 63]),
        ({"data_parallel": 8, "tensor_parallel": 8}, [0, 7, 56, 63]),
        ({"stages": 4, "replicas": 16}, [0, 15, 32, 48, 63]),
        ({"stages": 2, "replicas": 1}, [0, 1]),
        ({"data_parallel": 1}, [0]),
    ],
)
def test_ranks_that_differ(axes: dict[str, int], ranks: list[int]) -> None:
    assert list(different_ranks(axes)) == ranks
