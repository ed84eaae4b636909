"""Transformers models as chains: what comes out, and which models and steps a pipeline does not take."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from azureml_strategy.huggingface.pipeline import ModelChain, UnfitModelError  # noqa: E402
from azureml_strategy.strategies.pipeline import PipelineError  # noqa: E402
from azureml_strategy.strategies.pipeline.chain import OwnChain  # noqa: E402
from azureml_strategy.strategies.pipeline.cutting import Cut, HuggingFaceChain, OtherStage, find_chain  # noqa: E402  # noqa: E402
from azureml_strategy.strategies.pipeline.micro_batches import MicroBatch, batch_size, cut  # noqa: E402

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}
TYPES = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 4}


def make(family: str, kind: str = "AutoModelForCausalLM", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **changes})
    return getattr(transformers, kind).from_config(config)


class Holding(LightningModule):
    """Holds models and layers under their names."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss


def chain_of(*models: nn.Module, **children: nn.Module) -> HuggingFaceChain:
    names = {f"model{number or ''}": model for number, model in enumerate(models)}
    return HuggingFaceChain(Holding(**names, **children), False)


def batch(samples: int = 2) -> dict[str, Tensor]:
    ids = torch.arange(1, 1 + samples * 9).view(samples, 9) % 60 + 1
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("gemma3_text", TYPES),
        ("qwen3", {"layer_types": TYPES["layer_types"][::-1], "sliding_window": 4, "use_sliding_window": True}),
        ("mistral", {"sliding_window": 4, "attn_implementation": "eager"}),
        ("olmo", {}),  # its last norm has no weights
        ("mixtral", {"num_local_experts": 4}),
        ("gpt_neox", {}),
        ("gpt2", {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16}),
    ],
)
@pytest.mark.parametrize("inputs", ["mask", "positions", "ids"])
def test_the_layers_one_after_another_give_what_the_model_gives(
    family: str, changes: dict[str, Any], inputs: str
) -> None:
    model = make(family, **changes).eval()
    module = Holding(model=model)
    chain = HuggingFaceChain(module, False)
    given = batch()
    if inputs == "positions":
        given |= {"attention_mask": given["attention_mask"].bool(), "position_ids": torch.arange(2, 11).expand(2, 9)}
    if inputs == "ids":
        del given["attention_mask"]
    with torch.no_grad():
        states, _ = chain.split(given)
        for index, layer in enumerate(chain.layers):
            states = chain.view(index, module.get_submodule(layer.name))(states)
        piece = MicroBatch(given, None, 2, "training_step", (0,))
        with chain.computed(piece, states):
            through_stages = model(**given).logits
    assert torch.equal(through_stages, model(**given).logits)


def test_the_layers_have_the_models_own_names_and_ties() -> None:
    chain = chain_of(make("gemma3_text", **TYPES, tie_word_embeddings=True))
    assert [(layer.name.removeprefix("model."), layer.kind) for layer in chain.layers] == [
        ("model.embed_tokens", "embedding"),
        *((f"model.layers.{index}", "block") for index in range(3)),
        ("model.norm", "norm"),
        ("lm_head", "head"),
    ]
    tied = {layer.name: (layer.tied, layer.tied_parameter) for layer in chain.layers if layer.tied}
    assert tied.keys() == {"model.model.embed_tokens", "model.lm_head"}
    assert set(tied.values()) == {("model_model_embed_tokens_weight", "weight")}
    assert not [layer for layer in chain_of(make("llama", tie_word_embeddings=False)).layers if layer.tied]


def test_layers_beside_the_model_stay_together_on_the_last_stage() -> None:
    module = Holding(model=make("llama", "AutoModel"), narrow=nn.Linear(16, 4), head=nn.Linear(4, 2), act=nn.Tanh())
    chain = HuggingFaceChain(module, False)
    assert [layer.name for layer in chain.layers][-3:] == ["model.norm", "narrow", "head"]
    assert Cut(module, chain, 6, "uniform").bounds == [0, 1, 2, 3, 4, 5, 7]
    module.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(PipelineError, match="Holding has scale outside of its transformers model"):
        Cut(module, chain, 2, "uniform")


def test_a_stage_keeps_its_own_layers_and_runs_views_of_them() -> None:
    model = make("llama")
    module = Holding(model=model)
    cut_module = Cut(module, HuggingFaceChain(module, False), 2, "uniform")
    cut_module.drop_others(1)
    views = [layer.build() for layer in cut_module.stage_layers()[cut_module.bounds[1] :]]
    cut_module.keep_built()
    assert isinstance(model.model.embed_tokens, OtherStage)
    assert isinstance(model.lm_head, nn.Linear)
    assert views[-1].state_dict().keys() == {"weight"}
    assert views[-1].weight is model.lm_head.weight
    assert views[0].state_dict().keys() == model.model.layers[2].state_dict().keys()
    again = HuggingFaceChain(module, False)
    assert Cut(module, again, 2, "uniform").bounds == cut_module.bounds


def test_a_sketch_whose_kept_layers_were_filled() -> None:
    with torch.device("meta"):
        module = Holding(model=make("llama"))
    module.model.model.rotary_emb = make("llama").model.rotary_emb  # computed, in no file
    chain = HuggingFaceChain(module, False)
    cut_module = Cut(module, chain, 2, "uniform")
    cut_module.drop_others(0)
    with pytest.raises(UnfitModelError, match=r"model\.model\.embed_tokens has no values.*load_pretrained"):
        cut_module.stage_layers()[0].build()
    module.model.to_empty(device="cpu")
    assert cut_module.stage_layers()[0].build().weight is module.model.model.embed_tokens.weight
    held = sum(parameter.numel() for parameter in module.parameters())
    assert held == sum(cut_module.parameters[: cut_module.bounds[1]])


def test_a_batch_of_a_tokenizer_is_cut_into_such_batches() -> None:
    whole = transformers.BatchEncoding(batch(4))
    assert batch_size(whole) == 4
    first, second = cut(whole, 2)
    assert type(first[0]) is transformers.BatchEncoding
    assert torch.equal(second[0].input_ids, whole["input_ids"][2:])
    assert type(cut(UserDict(batch(4)), 4)[0][0]) is UserDict


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((torch.zeros(2, 9),), "A batch of type tuple does not say what LlamaForCausalLM takes.*pipeline_batch"),
        ({"tokens": torch.zeros(2, 9)}, "of type dict.*'input_ids'"),
        ({"input_ids": torch.zeros(2, 9), "attention_mask": torch.zeros(2, 1, 9, 9)}, r"\(2, 1, 9, 9\).*\(samples, t"),
    ],
)
def test_batches_that_do_not_say_what_the_model_takes(given: Any, words: str) -> None:
    with pytest.raises(UnfitModelError, match=words):
        chain_of(make("llama")).split(given)


def test_a_pipeline_batch_of_the_module() -> None:
    class Choosing(Holding):
        def pipeline_batch(self, batch: Any) -> Any:
            return {"input_ids": batch[0]}, batch[1]

    chain = HuggingFaceChain(Choosing(model=make("llama")), False)
    ids = torch.ones(2, 3, dtype=torch.long)
    inputs, targets = chain.split((ids, "targets"))
    assert (len(inputs), targets) == (1, "targets")
    assert torch.equal(inputs[0], ids)


STEPS: dict[str, Any] = {
    "a second time": lambda model, ids, mask: [model(ids, mask), model(ids, mask)],
    "with other input_ids": lambda model, ids, mask: model(ids + 1, mask),
    "without attention_mask": lambda model, ids, mask: model(ids),
    "with token_type_ids": lambda model, ids, mask: model(ids, mask, token_type_ids=ids),
    "with output_hidden_states": lambda model, ids, mask: model(ids, mask, output_hidden_states=True),
    "with inputs_embeds": lambda model, ids, mask: model(inputs_embeds=torch.zeros(2, 9, 16), attention_mask=mask),
    "never calls LlamaForCausalLM": lambda model, ids, mask: None,
}


@pytest.mark.parametrize("words", STEPS)
def test_steps_that_a_pipeline_cannot_take(words: str) -> None:
    model, given = make("llama"), batch()
    chain = chain_of(model)
    chain.split(given)
    piece = MicroBatch(given, None, 2, "training_step", (0,))
    states = (torch.zeros(2, 9, 16), given["attention_mask"])
    with pytest.raises(UnfitModelError, match=f"training_step .*{words}"), chain.computed(piece, states):
        STEPS[words](model, given["input_ids"], given["attention_mask"])
    assert model(**given).logits.abs().sum() > 0, "forward must be the model's own again"


def test_models_that_a_pipeline_cannot_take() -> None:
    elsewhere = "azureml_model_parallel and azureml_deepspeed_stage_3"
    for words, children in {
        f"BertForMaskedLM has no plan.*{elsewhere}": {"model": make("bert", "AutoModelForMaskedLM")},
        "T5ForConditionalGeneration has an encoder and a decoder": {
            "model": make("t5", "AutoModelForSeq2SeqLM", d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
        },
        r"holds 2 transformers models \(model, other\)": {"model": make("llama"), "other": make("llama")},
        "has output_attentions=True": {"model": make("llama", output_attentions=True, attn_implementation="eager")},
        # the embedding's factor comes after the embedding, in every shell
        f"GraniteModel does more between its layers.*{elsewhere}": {"model": make("granite", embedding_multiplier=3.0)},
        "wrapped by peft": {"model": with_adapter(make("llama"))},
    }.items():
        with pytest.raises(UnfitModelError, match=words):
            find_chain(Holding(**children), False)


def with_adapter(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))  # type: ignore[no-any-return]


def test_activations_are_recomputed_once() -> None:
    model = make("llama")
    model.gradient_checkpointing_enable()
    find_chain(Holding(model=model), False)
    with pytest.raises(UnfitModelError, match=r"recomputes activations itself.*gradient_checkpointing_enable"):
        find_chain(Holding(model=model), True)


def test_a_forward_that_knows_the_numbers_of_its_blocks() -> None:
    class Numbered(transformers.LlamaModel):  # type: ignore[misc, name-defined]
        def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
            states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            for index, layer in enumerate(self.layers):
                states = layer(states * (1 + index))
            return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=self.norm(states))

    model = Numbered(transformers.LlamaConfig(**SMALL))
    with pytest.raises(UnfitModelError, match="Numbered does more between its layers") as refusal:
        ModelChain(Holding(model=model), lambda layer: bool(layer.state_dict())).check()
    assert refusal.value.__cause__ is None


def test_blocks_that_share_weights() -> None:
    model = make("llama")
    model.model.layers[2].mlp = model.model.layers[0].mlp
    with pytest.raises(UnfitModelError, match=r"layers\.0 and model\.model\.layers\.2 share mlp\.gate_proj\.weight"):
        chain_of(model)


def test_a_module_with_layers_of_its_own_is_cut_by_them() -> None:
    class Own(Holding):
        def pipeline_layers(self) -> list[Any]:
            return []

        def pipeline_batch(self, batch: Any) -> Any:
            return batch, batch

    assert type(find_chain(Own(model=make("llama")), False)) is OwnChain
    with pytest.raises(PipelineError, match=r"has no pipeline_layers\(\)"):
        find_chain(Holding(), False)
