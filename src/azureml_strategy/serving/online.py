"""The scoring script of an online endpoint: Azure ML's inference server calls `init` once, and `run` for each request.

`azureml-strategy model deploy` copies this file as score.py beside the user's modules.
"""

from __future__ import annotations

import os
from pathlib import Path

from azureml_inference_server_http.api.aml_request import AMLRequest, rawhttp
from azureml_inference_server_http.api.aml_response import AMLResponse

from azureml_strategy.serving.answers import answer
from azureml_strategy.serving.predictor import Predictor

_predictor: Predictor | None = None


def init() -> None:
    """Load the model of the folder that AZUREML_MODEL_DIR names."""
    global _predictor
    _predictor = Predictor.load(Path(os.environ["AZUREML_MODEL_DIR"]), Path(__file__).parent)


def run(request: AMLRequest) -> AMLResponse:
    """Answer a request: see `answer`."""
    assert _predictor is not None, "the server calls init first"
    status, content = answer(_predictor, request.method, request.stream)
    return AMLResponse(content, status, json_str=True)


rawhttp(run)  # the server reads this mark, and hands over requests as they are
