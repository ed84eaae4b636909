"""Which models may share their sequences, and what happens around them; several ranks: tests/multiprocess."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from azureml_strategy.huggingface.sequence_parallel import SharedSequences
from azureml_strategy.huggingface.sources import PretrainedModelError
from azureml_strategy.sequence_parallel import SequenceGroup

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENS = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[SequenceGroup]:
    """One rank, which has all parts."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield SequenceGroup(dist.group.WORLD)
    dist.destroy_process_group()


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, **changes))


def roberta() -> Any:
    shape = {name: size for name, size in SHAPE.items() if name != "num_key_value_heads"}
    return transformers.RobertaForCausalLM(transformers.RobertaConfig(**shape, is_decoder=True))


def qwen3_next() -> Any:
    sizes = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "num_experts": 2, "num_experts_per_tok": 1}
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**SHAPE, **sizes))


def with_loss_of_its_own() -> Any:
    model = llama()
    model.loss_function = lambda logits, labels, **_: logits.sum()
    return model


def with_forward_of_its_own() -> Any:
    class Mine(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
            return super().forward(input_ids=input_ids, **kwargs).logits[:, :-1].sum()

    torch.manual_seed(0)
    return Mine(transformers.LlamaConfig(**SHAPE))


def llama4_with_flash_attention() -> Any:
    config = transformers.Llama4TextConfig(**SHAPE, head_dim=8, attn_temperature_tuning=False)
    model = transformers.Llama4ForCausalLM(config)
    model.config._attn_implementation = "flash_attention_2"
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: llama(attn_implementation="eager").model, "it is no causal language model of transformers"),
        (roberta, "its positions are not rotary, and may not be the places of the tokens"),
        (qwen3_next, r"it has layers of another kind than attention \(linear_attention"),
        (lambda: transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=32, n_head=4, n_layer=1)),
         "its attention, eager, is not one that transformers lets others replace.*takes no position_ids"),
        (with_loss_of_its_own, "its loss_function is not that of transformers"),
        (with_forward_of_its_own, "its forward is not that of transformers, and may compute a loss of its own"),
        (lambda: llama(is_causal=False), "its configuration says that tokens see those behind them"),
        (lambda: transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**SHAPE, head_dim=8)),
         r"its attention counts the tokens that a rank sees \(attn_temperature_tuning\)"),
        (llama4_with_flash_attention, "flash attention cannot attend in chunks"),
        (lambda: llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
         r"rotary positions \(dynamic\) depend on how many tokens"),
        (lambda: llama(output_hidden_states=True), "config.output_hidden_states=True needs all tokens on one rank"),
    ],
)  # fmt: skip
def test_models_that_mix_tokens_elsewhere_are_refused(group: SequenceGroup, make: Any, words: str) -> None:
    model = make()
    with pytest.raises(PretrainedModelError, match=rf"Sequence parallelism does not work with .*{words}.*_size=1"):
        SharedSequences(model, [], group)
    assert not model._forward_pre_hooks


def test_a_call_with_labels_is_that_of_the_model_alone(group: SequenceGroup) -> None:
    model = llama()
    labels = TOKENS.masked_fill(TOKENS % 3 == 0, -100)
    expected = model(input_ids=TOKENS, labels=labels)
    shared = SharedSequences(model, [], group)
    found = model(TOKENS, labels=labels)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert found.past_key_values is None
    as_tuple = model(input_ids=TOKENS, labels=labels, return_dict=False)
    assert (len(as_tuple), as_tuple[0].item()) == (2, found.loss.item())
    shared.remove()
    assert torch.equal(model(input_ids=TOKENS).logits, expected.logits)
    assert model(input_ids=TOKENS).past_key_values is not None


def test_labels_that_are_shifted_already(group: SequenceGroup) -> None:
    model = llama()
    shifted = torch.nn.functional.pad(TOKENS, (0, 1), value=-100)[:, 1:]
    expected = model(input_ids=TOKENS, labels=TOKENS, num_items_in_batch=5).loss
    SharedSequences(model, [], group)
    found = model(input_ids=TOKENS, labels=shifted, shift_labels=shifted, num_items_in_batch=5).loss
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_labels_may_be_ignored_by_another_number(group: SequenceGroup) -> None:
    model = llama()
    labels = TOKENS.masked_fill(TOKENS % 3 == 0, 0)
    expected = model(input_ids=TOKENS, labels=labels, ignore_index=0).loss
    SharedSequences(model, [], group)
    assert model(input_ids=TOKENS, labels=labels, ignore_index=0).loss.item() == pytest.approx(
        expected.item(), rel=1e-6
    )


def test_other_models_of_the_same_configuration_are_refused(group: SequenceGroup) -> None:
    """They would exchange tokens as well, without the hooks that cut them."""
    policy = llama()
    reference = transformers.LlamaForCausalLM(policy.config)
    SharedSequences(policy, [], group)
    with pytest.raises(PretrainedModelError, match=r"is another model's as well.*copy.deepcopy"):
        SharedSequences(reference, [], group)
    for other in (reference, transformers.AutoModelForCausalLM.from_config(policy.config)):
        with pytest.raises(PretrainedModelError, match=r"made from its configuration.*attn_implementation='sdpa'"):
            other(input_ids=TOKENS)


def test_token_types_of_bidirectional_prefixes_are_refused(group: SequenceGroup) -> None:
    model = transformers.HrmTextForCausalLM(transformers.HrmTextConfig(**SHAPE, head_dim=8, pad_token_id=0))
    SharedSequences(model, [], group)
    with pytest.raises(PretrainedModelError, match="called with token_type_ids"):
        model(input_ids=TOKENS, token_type_ids=(TOKENS > 50).long())


def test_flash_attention_is_asked_for_by_its_own_name(group: SequenceGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_flash_attention_utils as kernels

    def load(implementation: str, *args: Any, **kwargs: Any) -> Any:
        assert implementation == "flash_attention_2"
        return kernel, kernel, None, kernels._pad_input, kernels._unpad_input

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, causal: bool, softmax_scale: float, dropout_p: float = 0
    ) -> Tensor:
        states = (each.transpose(1, 2) for each in (query, key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(
            *states, is_causal=causal, scale=softmax_scale, enable_gqa=True
        )
        return attended.transpose(1, 2)

    monkeypatch.setattr(kernels, "_lazy_imports", load)
    model = llama()
    expected = model(input_ids=TOKENS).logits
    model.config._attn_implementation = "flash_attention_2"
    SharedSequences(model, [], group)
    torch.testing.assert_close(model(input_ids=TOKENS).logits, expected)


def test_nothing_keeps_a_model_that_is_done_with(group: SequenceGroup) -> None:
    """As between the runs of a sweep in one process: its weights would stay on the device."""
    model = llama()
    SharedSequences(model, [], group).remove()
    done = weakref.ref(model)
    del model
    gc.collect()
    assert done() is None


def test_tokens_may_be_numbered_from_anywhere(group: SequenceGroup) -> None:
    model = llama().eval()
    positions = torch.arange(5, 12)[None]
    expected = model(input_ids=TOKENS, position_ids=positions).logits
    SharedSequences(model, [], group)
    torch.testing.assert_close(model(input_ids=TOKENS, position_ids=positions).logits, expected)


def test_embeddings_instead_of_tokens(group: SequenceGroup) -> None:
    model = llama().eval()
    expected = model(input_ids=TOKENS).logits
    SharedSequences(model, [], group)
    torch.testing.assert_close(model(inputs_embeds=model.get_input_embeddings()(TOKENS)).logits, expected)


def test_a_call_that_fails_does_not_change_the_next(group: SequenceGroup) -> None:
    model = llama().eval()
    expected = model(input_ids=TOKENS).logits
    SharedSequences(model, [], group)
    beyond: Tensor = TOKENS + 96
    with pytest.raises(IndexError):
        model(input_ids=beyond)
    torch.testing.assert_close(model(input_ids=TOKENS).logits, expected)


def test_adapters_that_call_past_the_hooks(group: SequenceGroup) -> None:
    """`peft` calls the forward of the model for some kinds of tasks, and the model for others."""
    peft = pytest.importorskip("peft")
    for task in (None, "CAUSAL_LM"):
        model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules="all-linear", task_type=task)).eval()
        expected = model(input_ids=TOKENS, labels=TOKENS).loss
        SharedSequences(model.get_base_model(), [model.base_model], group)
        found = model(input_ids=TOKENS, labels=TOKENS)
        assert found.loss.item() == pytest.approx(expected.item(), rel=1e-6), task
        assert found.past_key_values is None, "the call went past the hooks"
