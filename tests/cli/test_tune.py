"""`tune` from the command line, as the processes of an emulated job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from tests.training.conftest import COMMAND, run

from azureml_strategy.cli import main
from azureml_strategy.strategies import AzureMLDDPStrategy
from azureml_strategy.training.checks import compose_recipe
from azureml_strategy.training.recipes import find_recipe, shipped_recipes

# A model and a batch so small that a pass takes some milliseconds.
_SMALL = (
    *("trainer=cpu", "trainer.devices=1", "data.batch_size=2", "data.image_size=8", "data.num_workers=0"),
    *("tracking.progress_bar=null",),
)
# Some matrices in place of ResNet-50: as much to send for what there is to compute.
_MATRIX = "{_target_: torch.nn.Linear, in_features: %d, out_features: %d}"
_LAYERS = [_MATRIX % sizes for sizes in ((3 * 8 * 8, 1024), *[(1024, 1024)] * 4, (1024, 10))]
_MATRICES = (
    "model.network._target_=torch.nn.Sequential",
    f"++model.network._args_=[{{_target_: torch.nn.Flatten}}, {', '.join(_LAYERS)}]",
)
_BORING = "lightning.pytorch.demos.boring_classes"
# What shipped recipes leave to their users. Nothing is read before a fit.
_LEFT_TO_THE_USER = {
    "base_run": (f"model._target_={_BORING}.BoringModel", f"data._target_={_BORING}.BoringDataModule"),
    "finetune_lm": ("model.path=./model",),
    "resnet50_imagenet": ("data.root=./images",),
}


@pytest.mark.slow
def test_a_recipe_is_tuned_by_two_nodes_and_trained_with_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    two_nodes = [COMMAND, "emulate", "--nodes", "2", "--", COMMAND]
    done = run(*two_nodes, "tune", "resnet50_ddp", "--lossy", "bf16", *_SMALL, *_MATRICES, "--output", "here/it.json")
    assert "Communication settings of DDP (2 ranks" in done.stdout
    found = json.loads((tmp_path / "here" / "it.json").read_text())
    # On a busy machine a step may seem to wait for hardly any communication, of which the report says nothing more.
    is_searched = "hardly any communication" not in found["why"]
    assert ("gradients rounded to 8 bits of mantissa" in done.stdout) == is_searched
    assert found["conditions"]["world_size"] == 2
    assert found["request"]["lossy"] == ["bf16"]
    assert not list(tmp_path.rglob("*.ckpt")), "the model of a measurement is worth nothing"
    few = ("++trainer.max_steps=2", "++trainer.limit_val_batches=1", "checkpoint=none")
    run(*two_nodes, "train", "resnet50_ddp", *_SMALL, *_MATRICES, "strategy.tuned=here/it.json", *few)


def test_what_a_run_finds_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(COMMAND, "tune", "gpt_ddp", "trainer=cpu", "trainer.devices=1", "tracking=console", check=False)
    assert done.returncode == 1
    assert "One process sends no gradients" in done.stdout
    assert "nothing was measured" in done.stdout
    done = run(COMMAND, "tune", "resnet50_ddp", *_SMALL, "--lossy", "int3", check=False)
    assert done.returncode == 2
    assert "'int3', which is no compression" in done.stdout


@pytest.mark.parametrize("recipe", [each.name for each in shipped_recipes()])
def test_each_shipped_recipe_is_tuned_or_refused_in_a_sentence(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All is composed and made as `tune` does; only the fit itself is left out."""
    monkeypatch.chdir(tmp_path)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")  # what seed_everything writes goes away again
    fitted: list[Trainer] = []
    monkeypatch.setattr(Trainer, "fit", lambda trainer, *_, **__: fitted.append(trainer))
    code = main(["tune", recipe, "trainer=cpu", "tracking=console", *_LEFT_TO_THE_USER.get(recipe, [])])
    said = capsys.readouterr().err
    strategy = compose_recipe(find_recipe(recipe), []).hydra.runtime.choices.strategy
    if strategy != "ddp":
        assert (code, fitted) == (2, [])
        assert "Only recipes with strategy=ddp can be tuned." in said
        return
    assert fitted, said
    assert isinstance(fitted[0].strategy, AzureMLDDPStrategy)
    assert fitted[0].max_steps == 1
    assert not fitted[0].checkpoint_callbacks, "the model of a measurement is worth nothing"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt_zero3"], "Only recipes with strategy=ddp can be tuned."),
        (["resnet50_local_sgd"], "Only recipes with strategy=ddp can be tuned."),
        (["resnet50_dpp"], "resnet50_ddp"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *words]) == 2
    assert message in capsys.readouterr().err
