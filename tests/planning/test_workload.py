"""What a recipe says without its data and without a GPU."""

from __future__ import annotations

import pytest

from azureml_strategy.planning import PlanError
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
