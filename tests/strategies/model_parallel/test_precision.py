from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from azureml_strategy.strategies.model_parallel.precision import (
    FullPrecision,
    HalfMeshPrecision,
    MixedMeshPrecision,
    for_meshes,
)


@pytest.mark.parametrize(
    ("precision", "kind"),
    [
        ("32-true", FullPrecision),
        ("bf16-true", HalfMeshPrecision),
        ("16-true", HalfMeshPrecision),
        ("bf16-mixed", MixedMeshPrecision),
    ],
)
def test_every_precision_clips_over_meshes(precision: Any, kind: type[Precision]) -> None:
    plugin = Trainer(
        accelerator="cpu", devices=1, strategy="azureml_model_parallel", precision=precision
    ).precision_plugin
    assert type(plugin) is kind
    assert plugin.precision == precision


def test_a_plugin_of_the_users_own_is_kept() -> None:
    class Own(MixedPrecision):
        pass

    own = Own("bf16-mixed", "cpu")
    assert for_meshes(own) is own


def test_what_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"precision='64-true'\) does not work with azureml_model_parallel. Choose one"
    ):
        Trainer(accelerator="cpu", devices=1, strategy="azureml_model_parallel", precision="64-true")
    with pytest.raises(ValueError, match="precision='16-mixed'"):
        for_meshes(MixedPrecision("16-mixed", "cpu"))
