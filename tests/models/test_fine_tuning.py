"""The module of the recipe finetune_lm, in one process."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from tests.tiny_model import save_tiny_model
from torch.utils.data import DataLoader

from azureml_strategy.data import ChatDataModule, TextDataModule, count_tokens
from azureml_strategy.huggingface import PretrainedModelError
from azureml_strategy.models import FineTuner
from azureml_strategy.models.fine_tuning import forward_arguments


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fine_tuning")
    save_tiny_model(root / "tiny")
    lines = [json.dumps({"prompt": f"{number}+1=", "completion": str(number + 1)}) for number in range(40)]
    (root / "rows.jsonl").write_text("\n".join(lines))
    for number in range(3):
        (root / f"{number}.txt").write_text("to be or not to be, that is the question. " * 40)
    return root


def trainer(**arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return Trainer(**{**quiet, **arguments})


def chat(folder: Path, **arguments: Any) -> ChatDataModule:
    return ChatDataModule(str(folder / "tiny"), folder / "rows.jsonl", cache=folder / "cache", **arguments)


@pytest.mark.parametrize("rank", [0, 4])
def test_it_learns_from_conversations_whole_and_by_adapters(folder: Path, rank: int) -> None:
    torch.manual_seed(0)
    module = FineTuner(str(folder / "tiny"), lora_rank=rank, learning_rate=0.02, activation_checkpointing=rank == 0)
    run = trainer(max_epochs=8)
    run.validate(module, chat(folder), verbose=False)
    before = float(run.callback_metrics["val/loss"])
    run.fit(module, datamodule=chat(folder))
    assert float(run.callback_metrics["val/loss"]) < (0.6 if rank == 0 else 0.97) * before
    assert float(run.callback_metrics["val/perplexity"]) == pytest.approx(
        float(run.callback_metrics["val/loss"].exp()), rel=1e-5
    )
    trained = [name for name, each in module.named_parameters() if each.requires_grad]
    assert all(("lora_" in name) == (rank > 0) for name in trained)


def test_the_loss_is_the_average_over_all_tokens_however_they_are_batched(folder: Path) -> None:
    losses = []
    for size in (1, 4):
        run = trainer()
        run.validate(
            FineTuner(str(folder / "tiny")), chat(folder, batch_size=size, validation_fraction=0.3), verbose=False
        )
        losses.append(float(run.callback_metrics["val/loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_it_reads_plain_text_by_the_tokenizer_of_its_folder(folder: Path) -> None:
    data = TextDataModule(
        folder, tokenizer=str(folder / "tiny"), sequence_length=32, batch_size=2, cache=folder / "cache"
    )
    module, run = FineTuner(str(folder / "tiny")), trainer(max_steps=2)
    run.fit(module, datamodule=data)
    assert run.global_step == 2
    batch = {"input_ids": torch.zeros(2, 32)}
    assert count_tokens(batch) == 64
    weights = sum(each.numel() for each in module.parameters())
    assert module.training_flops(batch) == 6 * weights * 64


def test_what_does_not_fit_is_named_before_the_start(folder: Path) -> None:
    small = save_tiny_model(folder / "small", vocabulary=200)
    with pytest.raises(PretrainedModelError, match=r"has 260 tokens, but .*small has embeddings for 200"):
        trainer().fit(FineTuner(str(small)), datamodule=chat(folder))
    with pytest.raises(PretrainedModelError, match=r"lora_targets=\['qq'\] names no layer.*down_proj.*q_proj"):
        trainer().fit(FineTuner(str(folder / "tiny"), lora_rank=2, lora_targets=["qq"]), datamodule=chat(folder))


def test_targets_of_no_layer_are_named_where_others_have_layers(folder: Path) -> None:
    module = FineTuner(str(folder / "tiny"), lora_rank=2, lora_targets=["q_proj", "query", "w_q"])
    with pytest.warns(UserWarning, match=r"2 of 3 names in model.lora_targets .*: query, w_q\."):
        trainer(max_steps=1).fit(module, datamodule=chat(folder))
    adapted = {name.rpartition(".lora_A")[0] for name, _ in module.named_parameters() if ".lora_A" in name}
    assert {name.rpartition(".")[2] for name in adapted} == {"q_proj"}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 64, "num_key_value_heads": 2}
    routing = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    folder = tmp_path_factory.mktemp("experts")
    MixtralForCausalLM(MixtralConfig(initializer_range=0.3, **sizes, **routing)).save_pretrained(folder)
    return folder


def samples_of(keys: dict[str, Any]) -> list[dict[str, Any]]:
    """Four samples of 12 tokens, of which each has one label less than the one before, and more keys."""
    random = torch.Generator().manual_seed(0)
    samples = []
    for ignored in range(4):
        tokens, labels = (torch.randint(64, (12,), generator=random) for _ in range(2))
        labels[:ignored] = -100
        samples.append({"input_ids": tokens, "shift_labels": labels, **keys})
    return samples


def stock_losses(folder: Path, samples: list[dict[str, Any]], **inputs: Any) -> tuple[float, float]:
    """The cross-entropy over all labels, and what the model adds to it."""
    from transformers import AutoModelForCausalLM

    tokens, labels = (torch.stack([each[name] for each in samples]) for name in ("input_ids", "shift_labels"))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        outputs = model(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False, **inputs)
    entropy = float(torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten()))
    return entropy, float(outputs.loss) - entropy


@pytest.mark.parametrize("rank", [0, 4])
def test_the_loss_of_routers_is_trained_and_is_in_no_mean_over_tokens(experts: Path, rank: int) -> None:
    samples = samples_of({})
    entropy, auxiliary = stock_losses(experts, samples)
    assert auxiliary > 0.5
    run, module = trainer(), FineTuner(str(experts), lora_rank=rank, learning_rate=1e-12)
    run.validate(module, DataLoader(samples, batch_size=3), verbose=False)
    assert float(run.callback_metrics["val/loss"]) == pytest.approx(entropy, rel=1e-5)
    assert float(run.callback_metrics["val/perplexity"]) == pytest.approx(math.exp(entropy), rel=1e-4)

    fit = trainer(max_steps=1)
    returned: list[float] = []
    module.for_step = lambda loss: returned.append(loss.item()) or loss  # type: ignore[method-assign, func-returns-value]
    fit.fit(module, DataLoader(samples, batch_size=4))
    logged = fit.callback_metrics
    assert float(logged["train/loss"]) == pytest.approx(entropy, rel=1e-5)
    assert float(logged["train/auxiliary_loss"]) == pytest.approx(auxiliary, rel=1e-5)
    assert returned == [pytest.approx(entropy + auxiliary, rel=1e-5)]


def test_a_model_that_adds_nothing_logs_no_auxiliary_loss(folder: Path) -> None:
    run = trainer(max_steps=1)
    run.fit(FineTuner(str(folder / "tiny")), DataLoader(samples_of({}), batch_size=4))
    assert "train/auxiliary_loss" not in run.callback_metrics


def test_the_model_gets_what_its_forward_takes_by_name(experts: Path) -> None:
    packed = torch.arange(6).repeat(2)
    samples = samples_of({"position_ids": packed})
    expected, _ = stock_losses(experts, samples, position_ids=packed.repeat(4, 1))
    assert expected != pytest.approx(stock_losses(experts, samples)[0], rel=1e-3)
    run = trainer()
    run.validate(FineTuner(str(experts)), DataLoader(samples, batch_size=4), verbose=False)
    assert float(run.callback_metrics["val/loss"]) == pytest.approx(expected, rel=1e-6)


def test_keys_that_are_not_read_are_named_once(experts: Path) -> None:
    module, taken = FineTuner(str(experts)), torch.arange(12)
    samples = samples_of({"labels": taken, "weights": 0.5, "position_ids": taken})
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer(max_steps=2).fit(module, DataLoader(samples, batch_size=2))
        trainer().validate(module, DataLoader([(taken, taken, 0.5)] * 2), verbose=False)
    named = [str(each.message) for each in warned if "does not read" in str(each.message)]
    assert [each.partition(" of its batches")[0] for each in named] == [
        "FineTuner does not read labels, weights",
        "FineTuner does not read entry 2",
    ]


def test_the_keywords_that_a_forward_lists_are_taken() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    taken = forward_arguments(LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)))
    assert {"input_ids", "position_ids", "cu_seq_lens_q", "max_length_q"} <= taken
    assert not {"self", "kwargs", "token_type_ids"} & taken
