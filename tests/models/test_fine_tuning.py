"""The module of the recipe finetune_lm, in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from tests.tiny_model import save_tiny_model

from azureml_strategy.data import ChatDataModule, TextDataModule, count_tokens
from azureml_strategy.huggingface import PretrainedModelError
from azureml_strategy.models import FineTuner


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
