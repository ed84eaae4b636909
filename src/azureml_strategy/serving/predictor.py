"""Loads a registered model and computes its outputs."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from azureml_strategy.checkpoint import formats
from azureml_strategy.checkpoint.module_rebuild import make_module
from azureml_strategy.checkpoint.module_record import INPUT, MODULE
from azureml_strategy.serving import MAX_SAMPLES, WEIGHTS
from azureml_strategy.serving.inputs import MAX_NUMBERS, BadInputError, ExpectedInput

_DEFAULT_SAMPLES = 256
_SMALL = (8, 16)  # tried in place of a size that may vary


class ModelFaultError(RuntimeError):
    """The model failed on valid input. The message is for the client; the cause is for the log."""


class Predictor:
    """A model in evaluation mode on the GPU, or on the CPU where there is none. Threads may share it."""

    def __init__(self, module: LightningModule, expected: ExpectedInput) -> None:
        self.expected = expected
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._module = module.to(self._device).eval()
        for each in self._module.modules():
            if isinstance(each, nn.Embedding):
                each.register_forward_pre_hook(_check_rows)
        self._lock = threading.Lock()  # the user's forward may keep state in the module
        self._growth = 0.0  # where sizes vary: by how many numbers the answer grows for one more in a sample

    @classmethod
    def load(cls, folder: Path, code: Path) -> Predictor:
        """Load a registered model.

        Args:
            folder: folder of the model, with `weights.ckpt` somewhere in it.
            code: folder with the user's modules.

        Raises:
            CheckpointFormatError: there is no such file or several, or it does not tell enough; see `make_module`.
            ModelFaultError: the model fails on zeros.
        """
        # A deployment is to start in seconds. torch.compile would take minutes, and needs a compiler.
        torch.compiler.set_stance("force_eager")
        found = sorted(folder.rglob(WEIGHTS))
        if len(found) != 1:
            raise formats.CheckpointFormatError(
                f"The model has {len(found)} files {WEIGHTS}, and one is needed. Register it with azureml-strategy "
                "model register."
            )
        content = formats.read_file(found[0], trust_pickles=False)
        record: Mapping[str, Any] = content.get(MODULE, {})
        samples = int(os.environ.get(MAX_SAMPLES, _DEFAULT_SAMPLES))
        if str(code) not in sys.path:
            sys.path.append(str(code))  # it stays there: a forward may import modules
        made = cls(make_module(content), ExpectedInput.of(record.get(INPUT), samples))
        made.warm_up()
        return made

    def warm_up(self) -> None:
        """Compute one sample of zeros, so that a model that cannot be served fails before the first request.

        Where sizes vary, two small samples show how the answer grows with them. So a request whose answer would be too
        long is refused before it takes memory.

        Raises:
            ModelFaultError: the model failed.
        """
        sizes = self.expected.sizes
        if sizes is None:
            return
        if None not in sizes:
            self.predict(torch.zeros(1, *sizes, dtype=self.expected.dtype))  # type: ignore[arg-type]
            return
        samples = [
            torch.zeros(1, *(size if each is None else each for each in sizes), dtype=self.expected.dtype)
            for size in _SMALL
        ]
        try:
            with torch.inference_mode():
                outputs = [self._module(each.to(self._device)) for each in samples]
            numbers = [each.numel() for each in outputs]
        except Exception:  # the user's forward may raise anything, and may need larger samples
            return
        self._growth = (numbers[1] - numbers[0]) / (samples[1].numel() - samples[0].numel())

    def predict(self, samples: Tensor) -> dict[str, Any]:
        """Compute the model's outputs.

        Args:
            samples: `(N, *sizes)`, as `ExpectedInput.checked` gives them.

        Returns:
            `outputs`, a nested list with one entry for each sample; and `classes`, the number of the largest output of
            each sample, if the model gives a row of two or more numbers for each.

        Raises:
            BadInputError: an embedding has no row for a number of the samples, or the outputs are too many.
            ModelFaultError: the model failed, or gave something other than finite numbers for each sample.
        """
        _check_answer(self._growth * samples.numel())
        try:
            with self._lock, torch.inference_mode():
                outputs = self._module(samples.to(self._device))
        except BadInputError:
            raise
        except Exception as error:  # the user's forward may raise anything
            raise ModelFaultError(
                "The model failed on samples of the right shape and kind. The reason is in the log of the deployment."
            ) from error
        return _answer(outputs, len(samples))


def _check_rows(table: nn.Embedding, inputs: tuple[Tensor, ...]) -> None:
    """Refuse a number for which a table has no row. On a GPU it would make every later operation fail, too."""
    least, most = (int(each) for each in torch.aminmax(inputs[0]))
    if least < 0 or most >= table.num_embeddings:
        raise BadInputError(
            f"The model looks up {least if least < 0 else most} in a table of the numbers 0 to "
            f"{table.num_embeddings - 1}. Send tokens of the vocabulary it was trained with, and no longer samples."
        )


def _check_answer(numbers: float) -> None:
    if numbers > MAX_NUMBERS:
        raise BadInputError(
            f"The model gives {numbers:,.0f} numbers for these samples, and an answer holds {MAX_NUMBERS:,} at most. "
            "Send fewer samples at a time, or shorter ones."
        )


def _answer(outputs: Any, samples: int) -> dict[str, Any]:
    if not isinstance(outputs, Tensor) or outputs.dim() == 0 or len(outputs) != samples:
        raise ModelFaultError(
            "The model's forward gives no tensor with a row for each sample, so that it cannot be served as it is. "
            "Wrap it in a LightningModule whose forward does."
        )
    _check_answer(outputs.numel())
    numbers = outputs.float().cpu()
    if not torch.isfinite(numbers).all():
        raise ModelFaultError("The model computed NaN or infinity for these samples.")
    answer: dict[str, Any] = {"outputs": numbers.tolist()}
    if numbers.dim() == 2 and numbers.shape[1] > 1:
        answer = {"classes": numbers.argmax(dim=1).tolist(), **answer}
    return answer
