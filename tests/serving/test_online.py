"""Azure ML's own inference server with our scoring script: right classes for digits, and a sentence for all else."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from lightning.pytorch import LightningModule
from tests.serving.conftest import Endpoint, Trained, classes_of, serve
from torch import Tensor

SAMPLE = np.zeros((1, 3, 32, 32), np.uint8).tolist()


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_digits_get_the_classes_of_the_modules_own_forward(
    endpoint: Endpoint, digits: tuple[Tensor, Tensor], module: LightningModule
) -> None:
    images, labels = digits[0][:200], digits[1][:200]
    answer = endpoint.post({"data": images.tolist()})
    assert answer.status_code == 200, answer.text
    classes = answer.json()["classes"]
    assert classes == classes_of(module, images)
    assert np.mean(np.array(classes) == labels.numpy()) > 0.9
    with torch.no_grad():
        np.testing.assert_allclose(answer.json()["outputs"], module(images).numpy(), rtol=1e-5, atol=1e-5)


def test_the_bytes_of_an_array_and_several_requests_at_once(
    endpoint: Endpoint, digits: tuple[Tensor, Tensor], module: LightningModule
) -> None:
    parts = digits[0][:80].split(10)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda part: endpoint.post(data=npy(part.numpy())), parts))
    assert [each.status_code for each in answers] == [200] * 8
    assert [each.json()["classes"] for each in answers] == [classes_of(module, part) for part in parts]
    turned = np.asfortranarray(parts[0].numpy())
    assert endpoint.post(data=npy(turned)).json() == answers[0].json()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", 'The request is empty. Send JSON, {"data": [SAMPLE, ...]}'),
        (b"digits", "The request is no JSON that can be read."),
        (b'{"data": [[1, 2', "The request is no JSON that can be read."),
        (b"\xff\xfe\x00", "The request is no JSON that can be read."),
        (b"[" * 100_000, "The request is no JSON that can be read."),
        (b"[[1]]", 'The request is a list, not an object with "data".'),
        (b"{}", 'The request is an object without "data".'),
        (b'{"data": 3}', '"data" is a int, but must be a list of samples'),
        (b'{"data": []}', "There is no number in what was sent. Send one sample or more, (N, 3, 32, 32)."),
        (b'{"data": [[]]}', "There is no number in what was sent."),
        (b'{"data": [[1, 2], [3]]}', "lists side by side have unequal lengths"),
        (b'{"data": [["a", "b"]]}', "The samples hold something other than numbers."),
        (b'{"data": [[null, 1]]}', "The samples hold something other than numbers."),
        (b'{"data": [[true, false]]}', "The samples hold something other than numbers."),
        (b'{"data": [1, 2, 3]}', "The samples have the shape (3,), but the model takes (N, 3, 32, 32)."),
        (json.dumps({"data": SAMPLE[0]}).encode(), "have the shape (3, 32, 32), but the model takes (N, 3, 32, 32)"),
        (json.dumps({"data": np.zeros((1, 3, 8, 8)).tolist()}).encode(), "have the shape (1, 3, 8, 8)"),
        (json.dumps({"data": np.full((1, 3, 32, 32), np.nan).tolist()}).encode(), "The samples hold NaN."),
        (json.dumps({"data": np.full((1, 3, 32, 32), -np.inf).tolist()}).encode(), "The samples hold -Infinity."),
        (npy(np.full((1, 3, 32, 32), np.nan)), "The samples hold NaN or infinity."),
        (npy(np.full((1, 3, 32, 32), 0.5)), "whole numbers from 0 to 255, and got fractions"),
        (npy(np.full((1, 3, 32, 32), 256)), "whole numbers from 0 to 255, and got 256 to 256"),
        (json.dumps({"data": np.full((1, 3, 32, 32), -1).tolist()}).encode(), "and got -1 to -1"),
        (b'{"data": [[1e999]]}', "have the shape (1, 1)"),
        (b'{"data": [[1' + b"0" * 400 + b"]]}", "The samples hold something other than numbers."),
        (npy(np.zeros((257, 3, 32, 32), np.uint8)), "There are 257 samples, and at most 256 at a time are taken."),
        (b" " * (16 * 2**20 + 1), "The request has 16.0 MiB, and at most 16 are taken."),
        (npy(np.zeros((1, 3, 32, 32), np.uint8))[:-1], "The .npy file is longer or shorter than its header says."),
        (b"\x93NUMPY\x01\x00\xff\xff{", "The .npy file has a damaged header."),
        (npy(np.array(["a"])), "The .npy file holds <U1, and no numbers."),
    ],
)
def test_bad_input_is_one_sentence(endpoint: Endpoint, body: bytes, words: str) -> None:
    answer = endpoint.post(data=body)
    assert answer.status_code == 400, answer.text
    assert list(answer.json()) == ["error"]
    told = answer.json()["error"]
    assert words in told
    assert "Traceback" not in told
    assert str(Path(__file__).parent) not in told


def test_a_pickle_is_not_opened(endpoint: Endpoint) -> None:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], object), allow_pickle=True)
    answer = endpoint.post(data=file.getvalue())
    assert answer.status_code == 400
    assert "The .npy file holds object, and no numbers." in answer.json()["error"]


def test_another_method(endpoint: Endpoint) -> None:
    answer = requests.get(f"{endpoint.url}/score", timeout=30)
    assert (answer.status_code, answer.json()) == (
        405,
        {"error": 'Send a POST request with JSON: {"data": [SAMPLE, ...]}.'},
    )


FAULTY = """\
    def forward(self, images):
        if images.std() > 0.5:
            raise RuntimeError("of /a/path")
        return self.layers(images) * (float("nan") if images.mean() > 2 else 1)
"""


def test_a_fault_of_the_model_is_told_to_the_log_alone(
    inference_server: str, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "code").mkdir()
    own = (trained.code / "my_parts.py").read_text()
    (tmp_path / "code" / "my_parts.py").write_text(own[: own.index("    def forward")] + FAULTY)
    black = np.zeros((1, 3, 32, 32), np.uint8)
    striped, white = black.copy(), black + 255
    striped[..., ::2] = 255
    served = Trained(tmp_path / "code", trained.model)
    for endpoint in serve(inference_server, served, tmp_path, AZUREML_STRATEGY_MAX_SAMPLES="2"):
        answers = [endpoint.post(data=npy(images)) for images in (striped, white, black)]
        assert [each.status_code for each in answers] == [500, 500, 200], "it goes on"
        assert answers[0].json()["error"].startswith("The model failed on samples of the right shape and kind.")
        assert answers[1].json()["error"] == "The model computed NaN or infinity for these samples."
        assert "/a/path" not in answers[0].text
        assert "RuntimeError: of /a/path" in endpoint.log.read_text()
        assert "at most 2 at a time" in endpoint.post(data=npy(np.repeat(black, 3, 0))).json()["error"]
