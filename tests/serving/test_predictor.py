"""What a model of tokens is served as: numbers that are looked up in a table."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
import torch

from azureml_strategy.models import GPTConfig, LanguageModel
from azureml_strategy.serving.answers import answer
from azureml_strategy.serving.inputs import ExpectedInput
from azureml_strategy.serving.predictor import Predictor


@pytest.fixture(scope="module")
def gpt() -> Predictor:
    module = LanguageModel(
        GPTConfig(vocab_size=11, context=8, layers=1, width=8, heads=2, mlp_width=16, positions="learned")
    )
    module.configure_model()
    return Predictor(module, ExpectedInput((None,), torch.int64, 4))


def post(predictor: Predictor, samples: Any) -> tuple[int, dict[str, Any]]:
    return answer(predictor, "POST", io.BytesIO(json.dumps({"data": samples}).encode()))


def test_a_gpt_gives_logits_for_tokens(gpt: Predictor) -> None:
    status, content = post(gpt, [[0, 10, 3], [4, 5, 6]])
    assert status == 200
    assert torch.tensor(content["outputs"]).shape == (2, 3, 11)


def test_an_answer_that_would_take_the_memory_is_refused(gpt: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("azureml_strategy.serving.predictor.MAX_NUMBERS", 40)
    assert post(gpt, [[1, 2, 3]])[0] == 200
    status, content = post(gpt, [[1, 2, 3, 4]])
    assert status == 400
    assert content["error"].startswith("The model gives 44 numbers for these samples, and an answer holds 40 at most.")


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([[0, 11]], "The model looks up 11 in a table of the numbers 0 to 10. Send tokens of the vocabulary"),
        ([[0, -1]], "The model looks up -1 in a table of the numbers 0 to 10."),
        ([[0] * 9], "The model looks up 8 in a table of the numbers 0 to 7. .* no longer samples."),
    ],
)
def test_what_its_tables_do_not_hold_is_refused(gpt: Predictor, samples: Any, words: str) -> None:
    status, content = post(gpt, samples)
    assert status == 400
    assert re.match(words, content["error"])
