"""Compiled training has the losses of plain training under every strategy, and as many graphs as kinds of blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.multiprocess.conftest import RunJob

SHARDED = ("zero_1", "zero_2", "zero_3", "offload", "fsdp2", "recomputing", "local_sgd", "diloco")
# One graph for each kind. A GPT's embedding and its output layer, which computes the loss, are kinds beside the blocks,
# as are embeddings and normalisations of transformers; in the first block behind a frozen embedding no input takes a
# gradient, which makes one more with LoRA.
GRAPHS = {"two_kinds": 2, "gpt": 3, "rotary": 3, "gpt_recomputing": 3, "llama": 3, "lora": 4}
MATRIX = {
    "two_kinds": [f"{each}/two_kinds/resumed" for each in ("ddp", *SHARDED, "tensor_parallel", "pipeline")],
    "gpt": [f"{each}/gpt" for each in ("ddp", *SHARDED, "tensor_parallel", "sequence_parallel", "pipeline")],
    "variants": [f"{each}/{model}" for each in ("zero_3", "fsdp2") for model in ("rotary", "gpt_recomputing")],
    "llama": [f"{each}/{model}" for each in ("zero_2", "zero_3", "fsdp2", "local_sgd") for model in ("llama", "lora")],
    "pipeline": [f"{each}/{model}" for each in ("pipeline", "pipeline_recomputing") for model in ("rotary", "llama")],
    "resnet": [f"{each}/resnet" for each in ("ddp", "zero_2", "zero_3", "fsdp2", "local_sgd")],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64)).save_pretrained(tmp_path / "llama")
    return tmp_path


def test_losses_and_graphs(run_job: RunJob, tmp_path: Path) -> None:
    _compare(run_job, tmp_path, "aot_eager", 2, ["zero_3/two_kinds"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("cases", MATRIX.values(), ids=MATRIX)
def test_each_strategy(run_job: RunJob, folder: Path, ranks: int, cases: list[str]) -> None:
    tried = [each for each in cases if ranks > 1 or not each.startswith(("tensor_parallel", "sequence_parallel"))]
    _compare(run_job, folder, "aot_eager", ranks, tried)


@pytest.mark.exhaustive
def test_inductor(run_job: RunJob, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    kernels = tmp_path_factory.getbasetemp() / "inductor"
    cases = [f"{each}/two_kinds" for each in ("ddp", "zero_2", "zero_3", "fsdp2", "tensor_parallel", "pipeline")]
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(kernels), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    _compare(run_job, tmp_path, "inductor", 2, [*cases, "local_sgd/two_kinds", "fsdp2/gpt"], variables)


def _compare(
    run_job: RunJob, folder: Path, backend: str, ranks: int, cases: list[str], extra: dict[str, str] | None = None
) -> None:
    job = run_job("compiled.py", backend, folder, *cases, processes_per_node=ranks, extra=extra)
    assert job.exit_code == 0, job.output
    for rank, results in job.results.items():
        for case, found in results.items():
            where, (strategy, model, *_) = f"{case}, rank {rank}", case.split("/")
            plain, compiled = found["off"], found["blocks"]
            assert len(plain["losses"]) == 20, where
            assert compiled["losses"] == pytest.approx(plain["losses"], abs=1e-5, rel=1e-5), where
            assert compiled["names"] == plain["names"], where
            assert compiled["said"] == [], where
            for ways, losses in found["resumed"].items():
                # How exact the resumption itself is, others test.
                assert losses == pytest.approx(found["resumed"]["off, off"], abs=1e-5, rel=1e-5), (where, ways)
            if model in GRAPHS and strategy in ("ddp", *SHARDED, "tensor_parallel"):
                assert compiled["graphs"] == GRAPHS[model], where
