"""The model of a recipe as ONNX: the same outputs by onnxruntime."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from lightning.pytorch import LightningModule
from tests.serving.conftest import Trained
from torch import Tensor

from azureml_strategy.cli import main


def test_a_recipes_model_computes_the_same_by_onnxruntime(
    trained: Trained, digits: tuple[Tensor, Tensor], module: LightningModule, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["consolidate", str(trained.weights), "digits.onnx", "--format", "onnx", "--code", str(trained.code)]
    assert main(command) == 0
    assert capsys.readouterr().out == "digits.onnx: input (N, 3, 32, 32), for any N\n"
    session = onnxruntime.InferenceSession("digits.onnx", providers=["CPUExecutionProvider"])
    for size in (1, 2, 7, 64):
        images = digits[0][:size]
        with torch.no_grad():
            expected = module(images).numpy()
        (computed,) = session.run(None, {"input": images.numpy()})
        np.testing.assert_allclose(computed, expected, rtol=1e-4, atol=1e-4)
        assert (computed.argmax(1) == expected.argmax(1)).all()
