"""Every way to misspell a run is refused before anything is built, with what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tests.training.conftest import Compose

from azureml_strategy.training.checks import check_config, check_overrides
from azureml_strategy.training.recipes import RecipeError, find_recipe
from azureml_strategy.training.resolvers import register_resolvers


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["seed=1", "+vars.mine=2", "~vars", "data=synthetic", "data.steps_per_epoch=3", "hydra.run.dir=here"],
        ["seed=1,2", "model.learning_rate=0.1,0.2"],
        ["seed=range(1,4)", "model.learning_rate=choice(0.1,0.2)", "model=glob(*)", "model.momentum=interval(0,1)"],
        ["data=synthetic,digits", "data.steps_per_epoch=3"],
        ["+callbacks.mine={_target_: lightning.pytorch.callbacks.Timer, duration: '00:01:00:00'}"],
    ],
)
def test_what_fits_is_let_through(overrides: list[str]) -> None:
    register_resolvers()
    check_overrides(find_recipe("resnet50_ddp"), overrides)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.max_epoch=2", "Did you mean 'trainer.max_epochs'"),
        ("max_epochs=2", "Did you mean 'trainer.max_epochs'"),
        ("sede=1", "Did you mean 'seed'"),
        ("model.learning_rte=1,2", "'model.learning_rte=1' does not fit .* Did you mean 'model.learning_rate'"),
        ("data=sinthetic", "Did you mean 'synthetic'"),
        ("data=sinthetic,digits", "Did you mean 'synthetic'"),
        ("strategy=fsdp", r"Known: .*\bddp, .*lightning_ddp"),
        ("~sede", "'sede' does not exist"),
        ("seed=(1", "'seed=.1' is not in Hydra's notation"),
        ("model=[1", "is not in Hydra's notation"),
        ("data.root=https://store/c?sig=abc%3D", "sig=<redacted>. is not in Hydra's notation"),
        ("hydra.run.dri=x", "Could not override 'hydra.run.dri'"),
    ],
)
def test_overrides_that_do_not_fit(override: str, words: str) -> None:
    register_resolvers()
    with pytest.raises(RecipeError, match=words):
        check_overrides(find_recipe("resnet50_ddp"), ["seed=1", override])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("defaults: [resnet50_dpd, _self_]", "resnet50_dpd"),
        ("defaults: [resnet50_ddp, {override data: digit}, _self_]", "data/digit"),
        ("defaults: [resnet50_ddp\n", "cannot be composed"),
    ],
)
def test_a_recipe_that_cannot_be_composed(tmp_path: Path, text: str, words: str) -> None:
    register_resolvers()
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(RecipeError, match=words):
        check_overrides(find_recipe("mine.yaml"), [])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["+strategi=1"], "section 'strategi', which nothing reads. Did you mean 'strategy'.*`vars`"),
        (["+mine=1"], "section 'mine', which nothing reads"),
        (["+trainer.max_epoch=1"], "takes no 'max_epoch'. Did you mean 'trainer.max_epochs'"),
        (["+trainer.logger=true"], "Set it there"),
        (["+trainer.enable_progress_bar=true"], "comes from `tracking.progress_bar`"),
        (["+model.learning_rat=1"], "model.learning_rat is set, .*takes no 'learning_rat'. .*'model.learning_rate'"),
        (["+model.network.zero_init=true"], "model.network.zero_init is set, .*'model.network.zero_init_residual'"),
        (["+data.batchsize=1"], "'data.batch_size'"),
        (["+tracking.throughput.units=1"], "'tracking.throughput.unit'"),
        (["+checkpoint.save_topk=1"], "'checkpoint.save_top_k'"),
        (["+callbacks.mine={_target_: lightning.pytorch.callbacks.Timer, durations: 1}"], "'callbacks.mine.duration'"),
    ],
)
def test_keys_that_nothing_takes(composed: Compose, overrides: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        check_config(composed("resnet50_ddp", *overrides))


def test_the_users_values_may_be_called_anything(composed: Compose) -> None:
    check_config(composed("resnet50_ddp", "+vars.mine=1", "+vars.deep={_partial_: true}", "seed=${vars.mine}"))


def test_a_key_of_the_users_file(tmp_path: Path) -> None:
    """A key that is not in the recipe it starts from is added, as Hydra has it, and then refused by us."""
    from hydra import compose, initialize_config_dir

    register_resolvers()
    (tmp_path / "mine.yaml").write_text("defaults: [resnet50_ddp, _self_]\ntrainer: {max_epoch: 3}\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose("mine")
    assert OmegaConf.select(config, "trainer.max_epoch") == 3
    with pytest.raises(RecipeError, match=r"'trainer\.max_epochs'"):
        check_config(config)
