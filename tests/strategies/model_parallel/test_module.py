"""What a module that holds a model of transformers says about how it is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from azureml_strategy.strategies.errors import ConfigurationError, MeshSizeError, MissingPlanError
from azureml_strategy.strategies.model_parallel.layout import check_counts
from azureml_strategy.strategies.model_parallel.module import (
    counts_of,
    plan_of,
    refuse_two_checkpointings,
    sharded_blocks_of,
)
from azureml_strategy.strategies.model_parallel.plan import match_plan

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
}


class Holder(nn.Module):
    """As a LightningModule holds a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@pytest.fixture
def llama() -> Any:
    with torch.device("meta"):
        return Holder(LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=3)))


def test_the_plan_of_the_model_fits_under_its_name_in_the_module(llama: Holder) -> None:
    styles = match_plan(llama, plan_of(llama, 2))
    assert styles["model.model.layers.1.self_attn.q_proj"] == "colwise"
    assert styles["model.model.embed_tokens"] == "rowwise"
    assert styles["model.lm_head"] == "colwise_gather_output"
    with torch.device("meta"):
        qwen = Holder(Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=3, head_dim=4)))
    assert match_plan(qwen, plan_of(qwen, 2))["model.model.layers.0.self_attn.q_norm"] == "sum_gradients"


def test_heads_that_do_not_divide_are_named(llama: Holder) -> None:
    with pytest.raises(MeshSizeError, match="tensor_parallel_size=4, but the model has 6 heads"):
        check_counts(4, counts_of(llama))
    with pytest.raises(MeshSizeError, match="tensor_parallel_size=2, but the model has 3 heads of keys and values"):
        check_counts(2, counts_of(llama))


def test_adapters_are_named(llama: Holder) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    llama.model = peft.get_peft_model(llama.model, config)
    with pytest.raises(MissingPlanError, match=r"Holder holds adapters of peft.*Write tensor_parallel_size=1"):
        plan_of(llama, 2)


def test_a_style_that_is_not_known_is_named(llama: Any) -> None:
    llama.model.tp_plan = {"lm_head": "moe_tp_experts"}
    with pytest.raises(ConfigurationError, match=r"says 'model.lm_head': 'moe_tp_experts'. Styles are colwise"):
        match_plan(llama, plan_of(llama, 2))


def test_blocks_are_the_models_own_without_those_that_share_a_parameter(llama: Any) -> None:
    assert sharded_blocks_of(llama) == list(llama.model.model.layers)
    config = BertConfig(**SHAPE)
    with torch.device("meta"):
        bert = Holder(BertForMaskedLM(config))
    blocks = sharded_blocks_of(bert)
    assert [type(block).__name__ for block in blocks] == ["BertLayer", "BertLayer"]
    with pytest.raises(MissingPlanError, match="BertForMaskedLM of transformers has no tensor-parallel plan"):
        plan_of(bert, 2)


def test_the_blocks_are_not_recomputed_twice(llama: Any) -> None:
    refuse_two_checkpointings(llama)
    llama.model.gradient_checkpointing_enable()
    with pytest.raises(ConfigurationError, match="gradient_checkpointing_enable"):
        refuse_two_checkpointings(llama)
