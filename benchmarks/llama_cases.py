"""A Llama of 1B shape with LoRA: by `FineTuner`, and in a loop by hand."""

from __future__ import annotations

from pathlib import Path

import torch
from fits import Case, fit, recipe
from gpt_cases import CLIP, Batch, HandWritten
from torch import Tensor
from turns import DEVICE, Step, Turns

from azureml_strategy.data import count_tokens
from azureml_strategy.huggingface import load_pretrained
from azureml_strategy.models import FineTuner
from azureml_strategy.tracking import ThroughputCallback

RANK, LEARNING_RATE = 16, 2e-4
# https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json
LLAMA_1B = {
    **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 2048},
}
SMALL = {
    **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32},
}
CASES: dict[str, Case] = {"recipe": recipe(compile="blocks"), "compile=off": recipe()}


def save_llama(shape: dict[str, int], folder: Path) -> Path:
    """Write a model with random weights, as nobody can download one here."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with DEVICE:
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)).bfloat16()
    model.save_pretrained(folder)
    return folder


def by_hand(folder: Path, total: int) -> Step:
    """The loop: the same model and adapters, each block compiled in place, as torchtitan and peft do it."""
    import peft

    base = load_pretrained(str(folder))
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config).to(DEVICE).train()
    for layer in model.get_base_model().model.layers:
        layer.compile()

    def loss_of(batch: Batch) -> Tensor:
        loss: Tensor = model(input_ids=batch[0], labels=batch[1], shift_labels=batch[1], use_cache=False).loss
        return loss

    trained = [each for each in model.parameters() if each.requires_grad]
    return HandWritten(loss_of, [{"params": trained}], LEARNING_RATE, total, torch.bfloat16).step


def train(case: Case, folder: Path, turns: Turns) -> None:
    """One fit of the recipe `finetune_lm`."""
    module = FineTuner(str(folder), lora_rank=RANK, learning_rate=LEARNING_RATE)
    throughput = ThroughputCallback(unit="tokens", batch_size=count_tokens)
    fit(case, module, turns, callbacks=[throughput], gradient_clip_val=CLIP, log_every_n_steps=20)
