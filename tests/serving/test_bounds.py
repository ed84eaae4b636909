"""What a request or a file makes an endpoint allocate is bounded by its own size, and said in one sentence."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.memory import peak_of

from azureml_strategy.models import GPTConfig, LanguageModel
from azureml_strategy.serving.answers import answer
from azureml_strategy.serving.inputs import MAX_TOKENS, BadInputError, ExpectedInput, read_file
from azureml_strategy.serving.predictor import Predictor

MIB = 2**20


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def claiming(shape: str) -> bytes:
    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + b"1234"


@pytest.fixture(scope="module")
def gpt() -> Predictor:
    """A model whose samples may have any length, and whose answer is 50,000 numbers for each token."""
    module = LanguageModel(
        GPTConfig(vocab_size=50_000, context=8, layers=1, width=8, heads=2, mlp_width=16, positions="rotary")
    )
    module.configure_model()
    made = Predictor(module, ExpectedInput((None,), torch.int64, 256))
    made.warm_up()
    return made


REQUESTS: dict[str, tuple[bytes, str]] = {
    "one long text": (json.dumps({"data": ["a" * MIB, *[""] * 4000]}).encode(), "something other than numbers"),
    "a long text among numbers": (json.dumps({"data": [[1, "a" * MIB], [0] * 4000]}).encode(), "other than numbers"),
    "lists": (b'{"data": [' + b"[]," * 4_000_000 + b"[]]}", "and at most 16,777,216 in 1,048,576 are read"),
    "objects": (b'{"data": [' + b"{}," * 4_000_000 + b"{}]}", "and at most 16,777,216 in 1,048,576 are read"),
    "deep": (b'{"data": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "no JSON that can be read"),
    "deeper than numpy": (b'{"data": ' + b"[" * 99 + b"1" + b"]" * 99 + b"}", "The samples"),
    "long samples": (npy(np.ones((1, 200_000), np.uint8)), "200,000 numbers, and at most 131,072 at a time"),
    "a long answer": (npy(np.ones((1, 10_000), np.uint8)), "The model gives 500,000,000 numbers"),
    "a large shape": (claiming("(1, 2305843009213693952)"), "longer or shorter than its header says"),
    "a shape of nothing": (claiming("(4611686018427387904, 4611686018427387904, 0)"), "longer or shorter"),
    "many dimensions": (claiming(str((1,) * 100 + (4,))), "The .npy file has a shape that numpy does not take"),
    "negative": (claiming("(-1, -4)"), "longer or shorter than its header says"),
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_takes_no_more_memory_than_a_few_times_its_size(kind: str, gpt: Predictor) -> None:
    body, words = REQUESTS[kind]
    with peak_of(64 * MIB + 8 * len(body)):
        status, content = answer(gpt, "POST", io.BytesIO(body))
    assert status == 400
    assert words in content["error"]


def test_what_fits_is_answered(gpt: Predictor) -> None:
    assert answer(gpt, "POST", io.BytesIO(npy(np.ones((2, 30), np.uint8))))[0] == 200
    assert ExpectedInput((None,), torch.int64, 4).checked(np.ones((1, MAX_TOKENS), np.uint8)).shape == (1, MAX_TOKENS)


@pytest.mark.parametrize("sizes", [None, (3, None, None)])
def test_a_batch_of_photographs_of_any_size_is_taken(sizes: Any) -> None:
    photographs = np.ones((64, 3, 224, 224), np.uint8)
    assert len(ExpectedInput(sizes, torch.uint8, 64).checked(photographs)) == 64
    with pytest.raises(BadInputError, match="at most 4,194,304 at a time"):
        ExpectedInput(sizes, torch.uint8, 64).checked(np.ones((1, 3, 2048, 1024), np.uint8))


def bomb(width: int, height: int) -> bytes:
    """A PNG file of so many pixels, all of one colour."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(ran) print\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("sizes", [(3, 8, 8), (3, None, None)])
@pytest.mark.parametrize("kind", ["eps", "gif", "tiff", "large", "webp"])
def test_an_image_is_of_the_formats_of_training_and_not_huge(kind: str, sizes: Any, tmp_path: Path) -> None:
    """Of whatever name: EPS would start Ghostscript."""
    file = tmp_path / "image.png"
    if kind == "eps":
        file.write_bytes(EPS)
    elif kind == "large":
        file.write_bytes(bomb(9_000, 9_000))
    elif kind == "webp":
        extended = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + b"\xff\x3f\x00" * 2
        file.write_bytes(b"RIFF" + struct.pack("<I", len(extended)) + extended)
    else:
        Image.new("RGB", (8, 8)).save(file, kind.upper())
    with peak_of(32 * MIB), pytest.raises(BadInputError, match=r"image\.png (is no image|has 9000 x 9000 pixels)"):
        read_file(file, ExpectedInput(sizes, torch.uint8, 1))
