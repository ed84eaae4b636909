"""Folders for from_pretrained from checkpoints that one process writes; other layouts are in tests/multiprocess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from tests.huggingface.conftest import Save, logits
from torch import Tensor, nn

from azureml_strategy.cli import main

transformers = pytest.importorskip("transformers")


def tiny(kind: str, **fields: Any) -> Any:
    config = {
        "llama": lambda: transformers.LlamaConfig(**small(), num_key_value_heads=2, **fields),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=16),
        "mixtral": lambda: transformers.MixtralConfig(**small(), num_key_value_heads=2, num_local_experts=2),
    }[kind]()
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def small() -> dict[str, int]:
    return {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }


class Holder(LightningModule):
    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        models = [each for each in self.children() if isinstance(each, transformers.PreTrainedModel)]
        return sum(each(input_ids=batch, labels=batch).loss for each in models)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def export(checkpoint: Path, output: Path, *options: str) -> int:
    return main(["consolidate", str(checkpoint), str(output), "--format", "hf", *options])


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_stock_from_pretrained_opens_the_folder(
    kind: str, save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mixtral's experts are one tensor in memory and one each in its files."""
    model = tiny(kind)
    model.generation_config.top_k = 7  # without do_sample: transformers would not write that
    checkpoint = save(Holder(model=model, head=nn.Linear(2, 1), words=tokenizer()), save_weights_only=True)
    assert export(checkpoint, tmp_path / "out", "--max-shard-size", "30KB") == 0
    printed = capsys.readouterr().out
    assert f"{type(model).__name__}, " in printed
    assert "Not written: 2 weights of the module outside of it (head.bias, head.weight)" in printed
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(opened) is type(model)
    assert torch.equal(logits(opened), logits(model))
    assert opened.generation_config.top_k == 7
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids(["b"]) == [1]
    if kind == "mixtral":
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert any("experts.1." in name for name in index["weight_map"]), "the names of Mixtral's own files"


def test_tied_weights_are_written_once_and_in_another_type(save: Save, tmp_path: Path) -> None:
    model = tiny("llama", tie_word_embeddings=True)
    checkpoint = save(Holder(model=model))
    assert export(checkpoint, tmp_path / "out", "--dtype", "bfloat16") == 0
    from safetensors import safe_open

    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - it is no dictionary
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert opened.dtype == torch.bfloat16
    for own, trained in zip(opened.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, trained.to(torch.bfloat16))
    content = torch.load(checkpoint, weights_only=True)
    content["state_dict"]["model.lm_head.weight"] = content["state_dict"]["model.lm_head.weight"] + 1
    torch.save(content, tmp_path / "untied.ckpt")
    assert export(tmp_path / "untied.ckpt", tmp_path / "untied") == 2


def test_what_transformers_keeps_in_float32_is_not_rounded(save: Save, tmp_path: Path) -> None:
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    config = transformers.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, **ends)
    model = transformers.T5ForConditionalGeneration(config)
    checkpoint = save(Holder(model=model), save_weights_only=True)
    assert export(checkpoint, tmp_path / "out", "--dtype", "float16") == 0
    found = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "out", dtype=torch.float16).state_dict()
    for name, each in model.state_dict().items():
        kept = name.endswith("wo.weight")
        assert torch.equal(found[name], each if kept else each.half()), name


def test_one_of_several_models(save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    student, teacher = tiny("llama"), tiny("gpt2")
    checkpoint = save(Holder(student=student, teacher=teacher))
    assert export(checkpoint, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "has 2 transformers models: student, teacher. Choose one: --module student" in error
    assert export(checkpoint, tmp_path / "out", "--module", "teacher") == 0
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(opened), logits(teacher))


def test_a_consolidated_file_still_tells(save: Save, tmp_path: Path) -> None:
    model = tiny("llama")
    assert main(["consolidate", str(save(Holder(model=model))), str(tmp_path / "weights.ckpt")]) == 0
    assert export(tmp_path / "weights.ckpt", tmp_path / "out") == 0
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


def test_a_checkpoint_of_another_strategy(save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, words = tiny("llama"), tokenizer()
    model.save_pretrained(tmp_path / "source")
    words.save_pretrained(tmp_path / "source")
    checkpoint = save(Holder(model=model), strategy="auto")
    assert export(checkpoint, tmp_path / "out") == 2
    assert "does not tell which transformers model is in it" in capsys.readouterr().err
    assert export(checkpoint, tmp_path / "out", "--model", str(tmp_path / "source")) == 0
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    tiny("gpt2").save_pretrained(tmp_path / "gpt2")
    assert export(checkpoint, tmp_path / "wrong", "--model", str(tmp_path / "gpt2")) == 2
    assert "holds the weights of a GPT2LMHeadModel under 0 names" in capsys.readouterr().err
    assert export(checkpoint, tmp_path / "wrong", "--model", str(tmp_path / "nowhere")) == 2
    assert f"--model {tmp_path / 'nowhere'}: " in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists()


def test_nothing_is_left_of_a_folder_that_cannot_be_written(
    save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = save(Holder(model=tiny("llama")))
    content = torch.load(checkpoint, weights_only=True)
    del content["state_dict"]["model.model.norm.weight"]
    content["state_dict"]["model.extra"] = torch.zeros(1)
    torch.save(content, checkpoint)
    assert export(checkpoint, tmp_path / "out") == 2
    assert "no model.norm.weight, an unknown extra (1 missing, 1 unknown)" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    assert export(checkpoint, tmp_path / "out") == 2
    assert "out exists. Name a folder that does not" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.part"))
    assert main(["consolidate", str(checkpoint), str(tmp_path / "file"), "--merge"]) == 2
    assert "--merge is not for --format lightning. Add --format hf" in capsys.readouterr().err
