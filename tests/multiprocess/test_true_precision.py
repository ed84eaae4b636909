"""`bf16-true` rounds weights, but no tables of transformers and no statistics, under any strategy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.multiprocess.conftest import RunJob
from torch import Tensor

PLACES = (100, 2000, 3000, 4000)
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "initializer_range": 0.8,
}
# Of this precision's own rounding: the order of sums differs where layers or sequences are cut.
TOLERANCE = 0.2
# Plain tables of transformers, one made anew for long rows, one that depends on their length, and one of a model's own.
KINDS = ("llama", "dynamic", "longrope", "gptj")


def configs() -> dict[str, Any]:
    """Models whose tables are made in different ways."""
    import transformers

    def scaled(kind: str, **more: Any) -> dict[str, Any]:
        return {"rope_parameters": {"rope_theta": 10000.0, "rope_type": kind, "factor": 4.0, **more}}

    known = {"original_max_position_embeddings": 1024}
    ends = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    llama = {**SHAPE, "num_key_value_heads": 4}
    short = {"max_position_embeddings": 512}
    return {
        "llama": transformers.LlamaConfig(**llama),
        "llama3": transformers.LlamaConfig(**llama, **scaled("llama3", **known, **ends)),
        "yarn": transformers.LlamaConfig(**llama, **scaled("yarn", **known)),
        "dynamic": transformers.LlamaConfig(**{**llama, **short}, **scaled("dynamic")),
        "longrope": transformers.Phi3Config(**llama, **known, pad_token_id=0, **scaled("longrope", **known, **factors)),
        "qwen3": transformers.Qwen3Config(**llama, head_dim=8),
        "gemma3": transformers.Gemma3TextConfig(**llama, head_dim=8, sliding_window=4),
        "gpt_neox": transformers.GPTNeoXConfig(**SHAPE, rotary_pct=0.5),
        "phi": transformers.PhiConfig(**llama, partial_rotary_factor=0.5),
        "gptj": transformers.GPTJConfig(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=8192, rotary_dim=4, initializer_range=0.5
        ),
        "gpt2": transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=8192, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        ),
    }


def save_models(root: Path, names: Sequence[str]) -> None:
    """Each model, a row for it, and its logits by transformers alone."""
    import transformers

    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (len(PLACES),))
    # with a mask, transformers does not take a gap between places for the start of another sample
    mask = torch.ones_like(tokens)
    row = {"input_ids": tokens, "labels": tokens, "position_ids": torch.tensor(PLACES), "attention_mask": mask}
    for name in names:
        model = transformers.AutoModelForCausalLM.from_config(configs()[name], dtype=torch.float32)
        model.save_pretrained(root / name)
        torch.save(row, root / name / "row.pt")
        torch.save(alone(root / name), root / name / "logits.pt")


def alone(folder: Path, rounded: bool = False) -> Tensor:
    """Logits of transformers by itself; `rounded`, with all buffers in bfloat16."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = model.bfloat16() if rounded else model
    row = {name: each.unsqueeze(0) for name, each in torch.load(folder / "row.pt").items()}
    with torch.no_grad():
        logits: Tensor = model(**row).logits.float()
    return logits


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that are not causal, or not in bfloat16: each with its class, type, logits in it, and a row."""
    import transformers

    root = tmp_path_factory.mktemp("others")
    torch.manual_seed(0)
    tokens = torch.randint(2, 64, (1, 300))
    far = {"input_ids": tokens[:, :4], "labels": tokens[:, :4], "position_ids": torch.tensor([PLACES])}
    row = {"input_ids": tokens, "labels": tokens}
    places = {"relative_attention": True, "position_buckets": 64, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}
    deberta = transformers.DebertaV2Config(
        **{**SHAPE, "initializer_range": 0.5}, **places, hidden_dropout_prob=0, attention_probs_dropout_prob=0
    )
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "dropout_rate": 0}
    t5 = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, **ends)
    gptj = configs()["gptj"]
    gptj.resid_pdrop = gptj.embd_pdrop = gptj.attn_pdrop = 0
    for kind, config, dtype, batch in (
        (transformers.DebertaV2ForMaskedLM, deberta, torch.bfloat16, row),
        (transformers.GPTJForCausalLM, gptj, torch.bfloat16, far),
        (transformers.T5ForConditionalGeneration, t5, torch.float16, row),
    ):
        folder = root / config.model_type
        kind(config).save_pretrained(folder)
        with torch.no_grad():
            logits = kind.from_pretrained(folder, dtype=dtype)(**batch).logits.float()
        torch.save((kind.__name__, dtype, logits, batch), folder / "known.pt")
    return root


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, "one of each kind"),
        pytest.param(1, "all", marks=pytest.mark.exhaustive),
        pytest.param(2, "all", marks=pytest.mark.exhaustive),
    ],
)
def test_tables_and_statistics_stay_precise(
    run_job: RunJob, tmp_path: Path, others: Path, ranks: int, cases: str
) -> None:
    folders = tmp_path / "models"
    save_models(folders, list(configs()) if cases == "all" else KINDS)
    job = run_job("true_precision.py", "models", folders, others, cases, processes_per_node=ranks)
    assert job.exit_code == 0, job.output
    known, rounded = torch.load(folders / "llama" / "logits.pt"), alone(folders / "llama", rounded=True)
    assert (rounded - known).abs().max() > 5 * TOLERANCE, "the test would see it"
    for rank in range(ranks):
        results = job.results[rank]
        assert max(results["strategies"].values()) < TOLERANCE, results["strategies"]
        assert results["early"] == 0
        assert results["families"] == dict.fromkeys(results["families"], 0)
        check_statistics(results["statistics"])
        check_stock(results["stock"], rank, 2 if cases == "all" else 1)
    assert [each["told"] for each in job.results[0]["statistics"].values()] == [1] * 5
    assert list(job.results[0]["modes"].values()) == [["network.0"]] * 5


@pytest.mark.parametrize("ranks", [1, 2])
def test_averages_and_sums_are_not_of_16_bits(run_job: RunJob, ranks: int) -> None:
    job = run_job("true_precision.py", "sums", processes_per_node=ranks)
    assert job.exit_code == 0, job.output
    for rank in range(ranks):
        results = job.results[rank]
        check_tables(results["tables"], rank)
        assert max(results["averages"].values()) < 1e-5, results["averages"]
        assert results["own_average"] == (rank == 0)
        assert results["stochastic"][0] == results["stochastic"][1]
        assert results["sums"]["zero_3"] == {"norm": pytest.approx(2 * (512 + 16) / 17, rel=0.004), "told": 0}
        assert results["sums"]["zero_2"]["told"] == (rank == 0)


def check_statistics(found: dict[str, Any]) -> None:
    """Each update is a hundredth, of which bfloat16 loses a part."""
    exact = 4.0 * (1 - 0.99**20)
    for name, each in found.items():
        assert each["mean"] == pytest.approx([exact] * 4, rel=1e-5), name
        assert each["type"] == "torch.float32", name
        assert each["offsets"] == each["after"] == "torch.bfloat16", name
        assert each["metrics"] == {"sum": 20 * 1001 + sum(range(20)), "mean": 1001 + 19 / 2}, name


def check_stock(found: dict[str, Any], rank: int, types: int) -> None:
    """DeBERTa computes places, and GPT-J its table, in torch's own type; T5 has weights that stay in float32."""
    assert len(found) == types * (4 + 4 + 2)
    for name, each in found.items():
        assert each["difference"] < 0.05, (name, each)
        kept = name.startswith("t5 ddp")
        assert [key.endswith("wo.weight") for key in each["float32"]] == [True, True] * kept, name
        assert each["told"] == (name.startswith("t5 fsdp2") and rank == 0), name


def check_tables(found: dict[str, Any], rank: int) -> None:
    """A table is rounded once, from float32. What is no buffer has the type that Lightning would have given it."""
    half = "torch.bfloat16"
    for name, each in found.items():
        assert each["error"] < 0.003, (name, each)
        assert each["types"] == [half, half, half, "torch.float32"], name
        assert each["told"] == (rank == 0), name
