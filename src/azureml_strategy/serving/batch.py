"""The scoring script of a batch endpoint: Azure ML calls `init` once in each process, and `run` for each mini-batch.

`azureml-strategy model deploy --batch` copies this file as score.py beside the user's modules.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from azureml_strategy.serving.inputs import BadInputError, read_file
from azureml_strategy.serving.predictor import Predictor

_predictor: Predictor | None = None


def init() -> None:
    """Load the model of the folder that AZUREML_MODEL_DIR names."""
    global _predictor
    _predictor = Predictor.load(Path(os.environ["AZUREML_MODEL_DIR"]), Path(__file__).parent)


def run(mini_batch: Sequence[str]) -> list[str]:
    """Predict for each file.

    Args:
        mini_batch: paths of files; see `read_file` for their kinds.

    Returns:
        One line of JSON for each file. It has the file's path, as Azure ML gives it, as `file`, and the result of
        `Predictor.predict`; for a file that the model cannot take, it has one sentence as `error`. Azure ML appends
        the lines to the output.

    Raises:
        ModelFaultError: the model failed, so that Azure ML tries the mini-batch again and counts its failure.
    """
    assert _predictor is not None, "Azure ML calls init first"
    lines = []
    for path in map(Path, mini_batch):
        try:
            row = {"file": str(path), **_predictor.predict(read_file(path, _predictor.expected))}
        except BadInputError as error:
            row = {"file": str(path), "error": str(error)}
        lines.append(json.dumps(row))
    return lines
