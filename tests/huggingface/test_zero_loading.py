"""What load_under_zero_3 reads, and what a process with a ZeRO-3 configuration builds besides what is cut.

tests/multiprocess/test_zero_huggingface.py trains models that are loaded by it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from tests.huggingface.conftest import TOKENS, Fit
from tests.tiny_model import save_tiny_model
from torch import Tensor, nn

from azureml_strategy.huggingface import load_pretrained
from azureml_strategy.huggingface.transformers_internals import class_for
from azureml_strategy.huggingface.zero_loading import FileTensor, read_weights
from azureml_strategy.strategies import AzureMLDDPStrategy, AzureMLDeepSpeedStrategy

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
integration = pytest.importorskip("transformers.integrations.deepspeed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


def says(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=TOKENS).logits
    return found


class Student(LightningModule):
    """Loads its model, and others while it trains: teachers, to which nobody's hooks give parameters."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.losses: list[float] = []
        self.said: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        self.model = load_pretrained(self.folder)

    def on_train_start(self) -> None:
        auto = transformers.AutoModelForCausalLM
        stock = auto.from_pretrained(self.folder)
        self.said = {
            "load_pretrained": says(load_pretrained(self.folder)),
            "from_pretrained": says(stock),
            "device_map": says(auto.from_pretrained(self.folder, device_map="cpu")),
        }
        made = auto.from_config(stock.config)
        made.load_state_dict(stock.state_dict())
        self.said["from_config"] = says(made)
        self.in_step = integration.is_deepspeed_zero3_enabled()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_end(self) -> None:
        self.generated = self.model.generate(TOKENS[:1], max_new_tokens=2, do_sample=False, pad_token_id=0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_one_process_trains_a_loaded_model_and_builds_whole_ones_meanwhile(fit: Fit, folder: Path) -> None:
    """Under ZeRO-3, again in the same process, then under DDP: the same, whatever came before."""
    expected = says(transformers.AutoModelForCausalLM.from_pretrained(folder))
    strategies: dict[str, Any] = {
        "zero_3": AzureMLDeepSpeedStrategy(stage=3),
        "again": AzureMLDeepSpeedStrategy(stage=3),
        "ddp": AzureMLDDPStrategy(),
    }
    students = {name: Student(folder) for name in strategies}
    for name, student in students.items():
        fit(student, strategies[name])
        assert not integration.is_deepspeed_zero3_enabled(), "after the training all models are whole"
        for way, said in student.said.items():
            assert torch.equal(said, expected), f"{way} under {name}"
        assert student.losses == pytest.approx(students["zero_3"].losses, rel=1e-6), name
        assert torch.equal(student.generated, students["zero_3"].generated), name
        assert student.in_step == (name != "ddp"), "ranks generate the same number of tokens while parameters are cut"
    assert students["ddp"].losses[1] < students["ddp"].losses[0]


def test_a_model_is_loaded_whole_beside_a_configuration_of_the_users(folder: Path) -> None:
    """As transformers' page on DeepSpeed tells those who use it without transformers' own Trainer."""
    expected = says(transformers.AutoModelForCausalLM.from_pretrained(folder))
    alive = integration.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_batch_size": 1})
    assert torch.equal(says(load_pretrained(folder)), expected)
    assert integration.is_deepspeed_zero3_enabled(), "it is the user's"
    assert alive.is_zero3()


def test_weights_are_read_when_they_are_used(tmp_path: Path) -> None:
    saved = {"whole": torch.randn(3, 4), "half": torch.randn(2).to(torch.bfloat16), "scalar": torch.tensor(3)}
    safetensors_torch.save_file(saved, tmp_path / "model.safetensors")
    read = dict(read_weights([tmp_path / "model.safetensors"], values=True))
    facts = dict(read_weights([tmp_path / "model.safetensors"], values=False))
    for name, expected in saved.items():
        weight = read[name]
        assert isinstance(weight, FileTensor)
        assert (weight.shape, weight.dtype) == (expected.shape, expected.dtype)
        assert (facts[name].shape, facts[name].dtype, facts[name].is_meta) == (expected.shape, expected.dtype, True)
        assert torch.equal(torch.empty_like(expected).copy_(weight), expected)
        assert torch.equal(torch.stack([weight, weight])[1], expected)


def test_a_class_without_a_model_for_the_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match="AutoModelForCausalLM has no model for ViTConfig"):
        class_for(transformers.AutoModelForCausalLM, transformers.ViTConfig())
    assert class_for(transformers.AutoModelForCausalLM, transformers.LlamaConfig()) is transformers.LlamaForCausalLM
