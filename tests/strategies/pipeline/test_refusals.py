"""What Lightning offers and a pipeline cannot do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.compile import from_compiled
from tests.strategies.pipeline.modules import Three

from azureml_strategy.strategies.pipeline import PipelineError
from azureml_strategy.strategies.pipeline.refusals import refuse_unsupported


def refuse(module: LightningModule, precision: str = "32-true", sync: bool = False, **arguments: Any) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=1, **quiet, **arguments)
    refuse_unsupported(trainer, module, precision, sync)


def test_what_is_supported() -> None:
    refuse(Three(), "bf16-mixed", gradient_clip_val=1.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2.*micro_batches"),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "gradient_clip_algorithm='value'"),
        ({"precision": "16-mixed"}, "16-mixed.*bf16-mixed"),
        ({"sync": True}, "sync_batchnorm=True"),
    ],
)
def test_arguments_of_the_trainer(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        refuse(Three(), **arguments)


def test_predictions() -> None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.state.fn = TrainerFn.PREDICTING
    with pytest.raises(MisconfigurationException, match=r"Trainer\.predict.*Consolidate"):
        refuse_unsupported(trainer, Three(), "32-true", sync_batchnorm=False)


class Manual(Three):
    automatic_optimization = False


class Iterating(Three):
    def training_step(self, dataloader_iter: Any) -> Any:
        return next(dataloader_iter)


class Clipping(Three):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        return None


class Backward(Three):
    def backward(self, *args: Any, **kwargs: Any) -> None:
        return None


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Manual, "Manual optimizes manually"),
        (Iterating, "takes a dataloader_iter"),
        (Clipping, r"configure_gradient_clipping\(\), which a pipeline never calls"),
        (Backward, r"backward\(\), which a pipeline never calls"),
    ],
)
def test_modules(kind: type[Three], words: str) -> None:
    module = kind()
    module.automatic_optimization = kind is not Manual
    with pytest.raises(PipelineError, match=words):
        refuse(module)


def test_a_compiled_module() -> None:
    module = Three()
    compiled = from_compiled(torch.compile(module))
    with pytest.raises(PipelineError, match=r"given to torch\.compile as a whole"):
        refuse(compiled)


class BeforeZeroGrad(Callback):
    def on_before_zero_grad(self, *args: Any) -> None:
        return None


def test_callbacks() -> None:
    with pytest.raises(PipelineError, match=r"BeforeZeroGrad has its own on_before_zero_grad\(\).*on_after_backward"):
        refuse(Three(), callbacks=[BeforeZeroGrad()])
