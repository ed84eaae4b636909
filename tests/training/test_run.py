from __future__ import annotations

import pytest
from lightning.pytorch.callbacks import EarlyStopping
from omegaconf import OmegaConf

from azureml_strategy.training.errors import RecipeError
from azureml_strategy.training.run import _callback


def test_a_callback_is_made() -> None:
    node = OmegaConf.create({"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val/top1"})
    assert isinstance(_callback("callbacks.early", node), EarlyStopping)


@pytest.mark.parametrize("node", [{"_target_": "collections.Counter"}, {"monitor": "val/top1"}])
def test_what_is_no_callback_is_refused_instead_of_left_out(node: dict[str, str]) -> None:
    with pytest.raises(RecipeError, match=r"callbacks\.early makes a \w+, which is no callback"):
        _callback("callbacks.early", OmegaConf.create(node))
