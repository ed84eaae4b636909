"""Checkpoints of transformers models on two emulated nodes, and what stock from_pretrained makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.multiprocess.conftest import RunJob

from azureml_strategy.cli import main

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SEQUENCE = torch.randint(0, 128, (24, 9), generator=torch.Generator().manual_seed(1))[:1]


def make_bases(folder: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    for seed, name in enumerate(("base", "other")):
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=SEQUENCE).logits
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("nodes", "strategies"),
    [
        (1, ("stage_3",)),
        pytest.param(1, ("ddp", "stage_2", "model_parallel"), marks=pytest.mark.exhaustive),
        (2, ("ddp", "model_parallel")),
        pytest.param(2, ("stage_2", "stage_3"), marks=pytest.mark.exhaustive),
    ],
)
def test_saving(nodes: int, strategies: tuple[str, ...], run_job: RunJob, tmp_path: Path) -> None:
    """One test for one job, which has trained each model under each strategy."""
    make_bases(tmp_path)
    job = run_job("huggingface_saving.py", *strategies, nodes=nodes)
    assert job.exit_code == 0, job.output
    for name in strategies:
        check_losses(job.each(name), name, 12 // nodes)
        check_whole(tmp_path / f"{name}_False_False", name)
        check_adapters(tmp_path / f"{name}_True_False", tmp_path / "base", name, 12 // nodes)
        for rank in range(nodes) if name in ("ddp", "stage_3") else ():
            refused = job.results[rank][name]["refused"]
            assert f"adapters of the base {tmp_path}/base (checksum" in refused, name
            assert f"this run has {tmp_path}/other (checksum" in refused, name


def check_losses(ranks: list[dict[str, Any]], name: str, steps: int) -> None:
    for rank in ranks:
        assert len(rank["straight"]) == steps
        assert rank["straight"][3:] == rank["resumed"], f"{name}: bit-equal"
        assert rank["logits"], f"{name}: bit-equal"
        assert len(rank["whole"]) == steps


def check_whole(folder: Path, name: str) -> None:
    found = transformers.AutoModelForCausalLM.from_pretrained(folder / "hugging_face")
    assert torch.equal(logits(found), torch.load(folder / "logits.pt")), name
    assert type(found) is transformers.LlamaForCausalLM


def check_adapters(folder: Path, base: Path, name: str, steps: int) -> None:
    expected = torch.load(folder / "logits.pt")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(model, folder / "hugging_face")), expected), name
    merged = folder / "merged"
    assert main(["consolidate", str(folder / f"step={steps}.ckpt"), str(merged), "--format", "hf", "--merge"]) == 0
    found = transformers.AutoModelForCausalLM.from_pretrained(merged)
    assert torch.allclose(logits(found), expected, atol=1e-5), name
    written = sum(file.stat().st_size for file in (folder / "hugging_face").iterdir())
    assert written < (base / "model.safetensors").stat().st_size, "the base is not in it"


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_rank_killed_and_a_job_that_goes_on(run_job: RunJob, tmp_path: Path) -> None:
    """By kill -9, between checkpoints: adapters under each strategy, and a whole model whose sequences are shared."""
    make_bases(tmp_path)
    names = ("ddp", "stage_2", "stage_3", "model_parallel", "sequence")
    straight = run_job("huggingface_saving.py", "straight", *names, nodes=2)
    assert straight.exit_code == 0, straight.output
    for name in names:
        killed = run_job("huggingface_saving.py", "kill", name, nodes=2)
        assert killed.exit_code != 0, "it was not killed"
    resumed = run_job("huggingface_saving.py", "killed", *names, nodes=2)
    assert resumed.exit_code == 0, resumed.output
    for rank in (0, 1):
        for name in names:
            expected, found = straight.results[rank][name], resumed.results[rank][name]
            left = len(found["losses"])
            assert 0 < left < len(expected["losses"]), f"{name}: it began anew"
            assert found == {"losses": expected["losses"][-left:], "logits": expected["logits"]}, f"{name}: bit-equal"
