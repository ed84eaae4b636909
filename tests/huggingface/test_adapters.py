"""Adapters of peft in one process: what a checkpoint holds, what a resume asks for, and the folders made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from tests.huggingface.conftest import Fit, Save, logits
from torch import Tensor

from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.cli import main
from azureml_strategy.huggingface.adapters import base_parameters, checksums, digest

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

BASE_SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


def write_base(folder: Path, seed: int = 0, **fields: int) -> Path:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(vocab_size=96, num_key_value_heads=2, **{**BASE_SIZE, **fields})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class FineTuning(LightningModule):
    def __init__(self, base: Path, **lora: Any) -> None:
        super().__init__()
        model = transformers.LlamaForCausalLM.from_pretrained(base)
        self.model = peft.get_peft_model(model, peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **lora}))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.1)


def export(checkpoint: Path, output: Path, *options: str) -> int:
    return main(["consolidate", str(checkpoint), str(output), "--format", "hf", *options])


def names_in(checkpoint: Path) -> set[str]:
    return set(torch.load(checkpoint, weights_only=True)["state_dict"])


def test_a_checkpoint_holds_adapters_and_trained_modules_only(save: Save, base: Path, tmp_path: Path) -> None:
    module = FineTuning(base, modules_to_save=["lm_head"])
    checkpoint = save(module)
    inner = "model.base_model.model"
    lora = {
        f"{inner}.model.layers.{layer}.self_attn.q_proj.lora_{side}.default.weight" for layer in (0, 1) for side in "AB"
    }
    assert names_in(checkpoint) == {*lora, f"{inner}.lm_head.modules_to_save.default.weight"}
    assert len(module.state_dict()) > 20, "after the training it is whole again"
    assert export(checkpoint, tmp_path / "out") == 0
    stock = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(stock, tmp_path / "out")), logits(module.model))
    assert export(checkpoint, tmp_path / "merged", "--merge") == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(merged), logits(module.model.merge_and_unload()))


def test_a_lora_checkpoint_is_small(fit: Fit, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", hidden_size=256, intermediate_size=1024)
    trainer = fit(FineTuning(base, r=1), callbacks=[JobCheckpoint(tmp_path / "run", hugging_face=True)])
    written = Path(str(trainer.checkpoint_callback.best_model_path)).stat().st_size
    assert written <= 0.02 * (base / "model.safetensors").stat().st_size
    assert (tmp_path / "run" / "hugging_face" / "adapter_model.safetensors").is_file()


def test_resuming_on_another_base_names_both(save: Save, fit: Fit, base: Path, tmp_path: Path) -> None:
    checkpoint = save(FineTuning(base))
    other = write_base(tmp_path / "other", seed=1)
    with pytest.raises(
        ValueError, match=rf"adapters of the base {base} \(.*this run has {other} \(.*parameters differ"
    ):
        fit(FineTuning(other), ckpt_path=checkpoint)
    fit(FineTuning(base), ckpt_path=checkpoint, max_steps=3)


def test_a_new_head_has_other_initial_values_each_time(save: Save, fit: Fit, base: Path) -> None:
    """peft trains a copy of the head, and keeps the original, which no file has."""

    class Classifier(FineTuning):
        def __init__(self) -> None:
            super().__init__(base)
            model = transformers.LlamaForSequenceClassification.from_pretrained(base, pad_token_id=0)
            self.model = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.model(input_ids=batch, labels=batch[:, 0] % 2).loss
            return loss

    checkpoint = save(Classifier())
    names = names_in(checkpoint)
    assert "model.base_model.model.score.modules_to_save.default.weight" in names
    assert not any("original_module" in name or "embed_tokens" in name for name in names)
    fit(Classifier(), ckpt_path=checkpoint, max_steps=3)


def test_missing_adapters_are_missed(save: Save, fit: Fit, base: Path) -> None:
    checkpoint = save(FineTuning(base))
    with pytest.raises(RuntimeError, match=r"Missing key.*v_proj.lora_A.default.weight") as error:
        fit(FineTuning(base, target_modules=["q_proj", "v_proj"]), ckpt_path=checkpoint)
    assert "embed_tokens" not in str(error.value)


def test_a_base_that_no_file_holds_is_written(
    save: Save, fit: Fit, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class FromConfiguration(FineTuning):
        def __init__(self) -> None:
            super().__init__(base)
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(base))
            self.model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))

    module = FromConfiguration()
    checkpoint = save(module)
    assert "model.base_model.model.model.norm.weight" in names_in(checkpoint)
    assert export(checkpoint, tmp_path / "out") == 2
    assert "holds the base beside its adapters, as no file has the same one" in capsys.readouterr().err
    assert export(checkpoint, tmp_path / "out", "--merge") == 0
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits(opened), logits(module.model), atol=1e-5)
    resumed = FineTuning(base)
    again = JobCheckpoint(tmp_path / "again")
    fit(resumed, callbacks=[again], ckpt_path=checkpoint, max_steps=3)
    assert "model.base_model.model.model.norm.weight" in names_in(Path(again.best_model_path)), (
        "it has another base now"
    )


def test_merging_needs_the_same_base(
    save: Save, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = save(FineTuning(base))
    other = write_base(tmp_path / "other", seed=1)
    assert export(checkpoint, tmp_path / "out", "--merge", "--model", str(other)) == 2
    assert f"but {other} has " in capsys.readouterr().err
    base.rename(tmp_path / "moved")
    assert export(checkpoint, tmp_path / "out", "--merge") == 2
    assert f"The base {base} cannot be read" in capsys.readouterr().err
    assert export(checkpoint, tmp_path / "out", "--merge", "--model", str(tmp_path / "moved")) == 0


def test_what_is_left_out(base: Path) -> None:
    whole = FineTuning(base, init_lora_weights="pissa")
    assert base_parameters(whole) == {}, "it has changed the base"
    module = FineTuning(base)
    module.model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    module.frozen = torch.nn.Linear(1, 1).requires_grad_(False)
    names = base_parameters(module)
    assert "model.base_model.model.lm_head.weight" in names
    assert [name for name in names if "lora_" in name or "frozen" in name] == []
    assert (
        base_parameters(FineTuning(base)).keys() == base_parameters(FineTuning(base, target_modules=["q_proj"])).keys()
    )


def test_checksums_tell_values_apart_whatever_their_type() -> None:
    values = torch.randn(3, 5).bfloat16()
    one = {"a": torch.nn.Parameter(values), "b": torch.nn.Parameter(-values)}
    same = {name: torch.nn.Parameter(each.float()) for name, each in one.items()}
    assert checksums(one) == checksums(same)
    with torch.no_grad():
        same["b"][2, 4] += 0.01
    assert checksums(one)["a"] == checksums(same)["a"]
    assert checksums(one)["b"] != checksums(same)["b"]
    assert digest(checksums(one)) != digest(checksums(same))


def test_a_target_that_matches_nothing(base: Path) -> None:
    """peft says so while the module is made, before any start."""
    with pytest.raises(ValueError, match=r"Target modules .*query.* not found in the base model"):
        FineTuning(base, target_modules=["query"])


def test_nothing_to_write_for_from_pretrained(fit: Fit, base: Path, tmp_path: Path) -> None:
    class Plain(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(7, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layer(batch.float()).mean()

        configure_optimizers = FineTuning.configure_optimizers

    with pytest.raises(MisconfigurationException, match=r"but the module holds no transformers model"):
        fit(Plain(), callbacks=[JobCheckpoint(tmp_path, hugging_face=True)])
    with pytest.raises(MisconfigurationException, match=r"SingleDeviceStrategy does not record the model"):
        fit(FineTuning(base), "auto", [JobCheckpoint(tmp_path, hugging_face=True)])
