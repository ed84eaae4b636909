"""Loading in one process: what stock `from_pretrained` gives, from a sketch whose weights are read later."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny_model import save_tiny_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    CLIPVisionConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaModel,
    LlamaPreTrainedModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

from azureml_strategy.huggingface.loading import (
    Loading,
    fill_all,
    is_sketch,
    load_pretrained,
    loading_as,
    refuse_lost_values,
    source_of,
)
from azureml_strategy.huggingface.sources import PretrainedModelError
from azureml_strategy.huggingface.transformers_internals import buffers_in_float32

HOST = torch.device("cpu")
TOKENS = torch.arange(3, 15).unsqueeze(0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    gemma = Gemma3TextConfig(vocab_size=64, num_key_value_heads=2, head_dim=8, sliding_window=4, **shape)
    Gemma3ForCausalLM(gemma).save_pretrained(root / "gemma3", max_shard_size="20KB")
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)).save_pretrained(root / "gpt2")
    return {"llama": save_tiny_model(root / "llama"), "gemma3": root / "gemma3", "gpt2": root / "gpt2"}


def sketched(folder: Path, *arguments: Any, **options: Any) -> Any:
    with loading_as(Loading("in_parts", HOST, "32-true")):
        return load_pretrained(folder, *arguments, **options)


def filled(module: nn.Module) -> Any:
    refuse_lost_values(module)
    fill_all(module, HOST)
    return module


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_sketch_that_is_filled_is_the_stock_model(folders: dict[str, Path], family: str) -> None:
    stock = AutoModelForCausalLM.from_pretrained(folders[family]).eval()
    model = sketched(folders[family])
    assert is_sketch(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.training
    assert source_of(model).folder == folders[family]
    ours = filled(model).eval()
    assert not is_sketch(model)
    assert torch.equal(ours(TOKENS).logits, stock(TOKENS).logits)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in stock.named_parameters()]
    whole = load_pretrained(folders[family]).eval()
    assert torch.equal(whole(TOKENS).logits, stock(TOKENS).logits)


def test_a_new_head_gets_initial_values_and_the_rest_those_of_the_files(folders: dict[str, Path]) -> None:
    model = filled(sketched(folders["llama"], AutoModelForSequenceClassification, num_labels=3))
    stock = AutoModelForCausalLM.from_pretrained(folders["llama"])
    assert model.score.weight.shape == (3, 32)
    assert 0 < model.score.weight.std() < 0.1
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, stock.model.layers[1].mlp.up_proj.weight)


def test_files_in_16_bits_become_float32_unless_all_training_is_in_16_bits(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    half = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.bfloat16)
    half.save_pretrained(tmp_path)
    assert {each.dtype for each in filled(sketched(tmp_path)).parameters()} == {torch.float32}
    with loading_as(Loading("whole", HOST, "bf16-true")):
        assert {each.dtype for each in load_pretrained(tmp_path).parameters()} == {torch.bfloat16}
    assert load_pretrained(tmp_path, dtype=torch.float16).dtype == torch.float16


def test_adapters_and_frozen_weights_of_a_sketch_stay_what_they_are(folders: dict[str, Path]) -> None:
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian")
    torch.manual_seed(1)
    stock = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folders["llama"]), config)
    with loading_as(Loading("in_parts", HOST, "32-true")):
        model = load_pretrained(folders["llama"])
        torch.manual_seed(1)
        ours = peft.get_peft_model(model, config)
    filled(ours)
    for (name, mine), theirs in zip(ours.named_parameters(), stock.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        assert mine.requires_grad == theirs.requires_grad == ("lora_" in name)


def test_a_copy_of_a_sketch_is_filled_as_well(folders: dict[str, Path]) -> None:
    student = sketched(folders["llama"])
    both = nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student)})
    filled(both)
    for mine, theirs in zip(both["student"].parameters(), both["teacher"].parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_weights_that_were_changed_before_they_were_read_are_refused(folders: dict[str, Path]) -> None:
    model = sketched(folders["llama"])
    model.lm_head = nn.Linear(32, 10, device="meta")
    with pytest.raises(PretrainedModelError, match=r"lm_head.weight, lm_head.bias \(2 parameters\) have no values"):
        filled(model)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_lables": 3}, "load_pretrained has no argument num_lables"),
        ({"hidden_size": 16}, r"is \(.*32\) in .*, but \(.*16\) in this LlamaForCausalLM"),
    ],
)
def test_what_does_not_fit_the_files_is_named(folders: dict[str, Path], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(PretrainedModelError, match=words):
        sketched(folders["llama"], **arguments)


def test_a_weight_that_the_files_lack_but_the_model_has_is_initialised(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    weights = load_file(folders["gpt2"] / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folders["gpt2"] / "config.json").read_bytes())
    model = filled(sketched(tmp_path))
    assert 0.01 < model.transformer.h[1].mlp.c_fc.weight.std() < 0.03


def test_models_inside_of_a_model_set_their_own_tables(tmp_path: Path) -> None:
    """Each has code of its own for what no file has. Memory that nobody sets would be places at random."""
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(image_size=8, patch_size=4, **tiny)
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(vocab_size=64, **tiny), image_token_index=63)
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    known = dict(LlavaForConditionalGeneration.from_pretrained(tmp_path).named_buffers())
    found = dict(load_pretrained(tmp_path, LlavaForConditionalGeneration).named_buffers())
    assert known.keys() == found.keys()
    assert "model.vision_tower.embeddings.position_ids" in known
    assert all(torch.equal(known[name], found[name]) for name in known)


class Scaled(GPT2LMHeadModel):
    """Its code sets no first value of what it adds."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(3))


def test_what_would_be_random_memory_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(PretrainedModelError, match=r"scale \(1 tensors\) would be random memory"):
        load_pretrained(folders["gpt2"], Scaled)


class Wrapped(LlamaPreTrainedModel):
    """A user's class around a model of transformers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.body = LlamaModel(config)
        self.register_buffer("own", torch.full((1,), 1.001))


class LlamaForCausalLM(PreTrainedModel):
    """As the code of a model on the hub, with the name of one of transformers' own."""

    config_class = LlamaConfig
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("inv_freq", torch.ones(4), persistent=False)


def test_tables_in_float32_are_known_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(model: nn.Module) -> list[str]:
        return [name for _, name in buffers_in_float32(model, torch.bfloat16)]

    monkeypatch.setattr("socket.socket.connect", _refuse)
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, **tiny)
    assert names(Wrapped(config)) == ["inv_freq", "original_inv_freq"]
    assert names(LlamaForCausalLM(config)) == []
    kernel = Wrapped(config)
    kernel.config._attn_implementation_internal = "kernels-community/nothing"
    assert names(kernel) == ["inv_freq", "original_inv_freq"]
    kernel.body.config = kernel.config = GPT2Config(n_embd=16, n_head=2)
    assert names(kernel) == []


def _refuse(*_: Any) -> None:
    raise AssertionError("nothing is to be downloaded")
