"""What a recipe says without its data and without a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from lightning.pytorch import LightningModule
from omegaconf import OmegaConf
from tests.tiny_model import save_tiny_model
from torch import nn

from azureml_strategy.huggingface import load_pretrained
from azureml_strategy.models import ImageClassifier, ResNet50
from azureml_strategy.planning import Distribution, PlanError
from azureml_strategy.planning.batches import data_section
from azureml_strategy.planning.fits import MemoryOf
from azureml_strategy.planning.optimizer_kind import optimizer_kind
from azureml_strategy.planning.workload import read_workload
from azureml_strategy.training.recipes import shipped_recipes

# They name neither a model nor data of their own.
_INCOMPLETE = {"base_run", "finetune_lm"}


@pytest.mark.parametrize("recipe", [each.name for each in shipped_recipes() if each.name not in _INCOMPLETE])
def test_every_shipped_recipe_is_read(recipe: str) -> None:
    found = read_workload(recipe, [])
    assert found.network.parameters > 0
    assert found.precision in (None, "32-true")  # the pipeline of ResNet-50 says it
    assert found.batch_size >= 1


@pytest.mark.parametrize("recipe", sorted(_INCOMPLETE))
def test_an_incomplete_recipe_is_said_to_be(recipe: str) -> None:
    with pytest.raises(PlanError):
        read_workload(recipe, [])


def test_settings_are_those_of_a_machine_with_gpus() -> None:
    imagenet = read_workload("resnet50_imagenet", ["trainer.max_epochs=2", "trainer.accumulate_grad_batches=4"])
    assert (imagenet.compiled, imagenet.samples, imagenet.accumulate) == (True, 2 * 1_281_167, 4)
    assert (imagenet.optimizer, imagenet.unit, imagenet.per_sample) == ("sgd", "images", 1)
    gpt = read_workload("gpt_ddp", ["model=gpt_125m", "trainer.precision=32"])
    assert (gpt.steps, gpt.unit, gpt.per_sample, gpt.precision) == (10_000, "tokens", 1024, "32-true")
    assert (gpt.network.blocks, gpt.network.width, gpt.network.tokens) == (12, 768, 1024)


@pytest.mark.parametrize("data", ["text", "chat"])
def test_fine_tuning_is_read_from_the_models_files(data: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    words = [f"model.path={tmp_path}", f"data={data}", "data.sequence_length=32"]
    whole = read_workload("finetune_lm", words)
    adapters = read_workload("finetune_lm", [*words, "model.lora_rank=4"])
    real = load_pretrained(tmp_path)
    elements = sum(each.numel() for each in real.parameters())
    assert (whole.network.parameters, whole.per_sample, whole.optimizer) == (elements, 32, "adam")
    assert sum(unit.elements for unit in adapters.network.units) == elements + adapters.network.parameters
    assert adapters.network.parameters < elements / 4
    memory = {each: MemoryOf(each)("bf16-mixed", Distribution(), 1) for each in (whole, adapters)}
    assert all(memory.values())


class Own(LightningModule):
    """A module of the user's, with an optimizer of theirs."""

    def __init__(self, optimizer: str, needs_trainer: bool = False) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3)
        self.optimizer, self.needs_trainer = optimizer, needs_trainer

    def configure_optimizers(self) -> Any:
        steps = self.trainer.max_steps if self.needs_trainer else 10
        made = getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.1)
        return {"optimizer": made, "lr_scheduler": torch.optim.lr_scheduler.LinearLR(made, total_iters=steps)}


@pytest.mark.parametrize(
    ("module", "kind", "note"),
    [
        (ImageClassifier(ResNet50()), "sgd", ""),
        (Own("SGD"), "sgd", ""),
        (Own("AdamW"), "adam", ""),
        (Own("RMSprop"), "adam", "The optimizer of Own .RMSprop. was taken for Adam"),
        (Own("SGD", needs_trainer=True), "adam", "configure_optimizers needs a Trainer"),
    ],
)
def test_the_optimizer_is_that_of_the_module(module: LightningModule, kind: str, note: str) -> None:
    found, said = optimizer_kind(module.to("meta"))
    assert found == kind
    assert re.search(note, said)
    assert bool(said) == bool(note)


@pytest.mark.parametrize(
    ("recipe", "overrides", "samples", "steps"),
    [
        ("resnet50_imagenet", ["data.root=/data/imagenet", "trainer.max_epochs=1"], 1_281_167, None),
        ("resnet50_imagenet", ["data.root=/data/products"], None, None),
        ("resnet50_imagenet", ["data.input_name=products"], None, None),
        ("resnet50_imagenet", ["num_classes=20"], None, None),
        ("resnet50_imagenet", ["trainer.max_steps=50", "trainer.max_epochs=2"], 2 * 1_281_167, 50),
        ("resnet50_imagenet", ["trainer.limit_train_batches=0.5", "trainer.max_epochs=2"], 1_281_167, None),
        ("resnet50_imagenet", ["trainer.limit_train_batches=30", "trainer.max_epochs=2"], 2 * 1_281_167, 60),
        ("resnet50_synthetic", ["trainer.accumulate_grad_batches=3"], None, 67),
        ("gpt_ddp", ["trainer.max_epochs=-1"], None, 10_000),
        ("gpt_ddp", ["trainer.limit_train_batches=5", "trainer.max_epochs=3"], None, 15),
    ],
)
def test_the_end_of_a_run(recipe: str, overrides: list[str], samples: float | None, steps: int | None) -> None:
    found = read_workload(recipe, overrides)
    assert (found.samples, found.steps) == (samples, steps)
    assert bool(found.data_note) == (samples is not None)


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        ([], None),
        (["trainer.devices=4"], 4),
        (["trainer.devices=-1"], None),
        (["trainer.devices=[0,2]"], 2),
        (["trainer.devices='0,1,3'"], 3),
        (["cluster.processes_per_node=2"], 2),
    ],
)
def test_the_gpus_of_a_node(overrides: list[str], gpus: int | None) -> None:
    assert read_workload("gpt_ddp", overrides).gpus_per_node == gpus


@pytest.mark.parametrize("recipe", ["resnet50_ddp", "gpt_ddp"])
def test_a_batch_is_as_a_loader_collates_it(recipe: str) -> None:
    workload = read_workload(recipe, ["data.batch_size=3"])
    section = data_section(OmegaConf.create(_data_of(recipe)), ranks=1)
    loaded = next(iter(instantiate(section).train_dataloader()))
    planned = workload.make_batch(3)
    assert [(each.shape, each.dtype) for each in planned] == [(each.shape, each.dtype) for each in loaded]


def _data_of(recipe: str) -> dict[str, Any]:
    data: Any = {
        "resnet50_ddp": {"_target_": "azureml_strategy.data.DigitsDataModule", "image_size": 32},
        "gpt_ddp": {"_target_": "azureml_strategy.data.TextDataModule", "sequence_length": 128},
    }[recipe]
    return {**data, "batch_size": 3}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model=resnet"], "resnet"),
        (["data.batch_size=0"], "Give the samples of a step"),
        (["data.image_size=null"], "The shapes of a batch"),
        (["model.network.zero=1"], "model cannot be made|zero"),
    ],
)
def test_a_wrong_recipe_is_said_to_be(overrides: list[str], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        read_workload("resnet50_imagenet", overrides)
    with pytest.raises(PlanError, match="There is no recipe 'resnet'"):
        read_workload("resnet", [])
