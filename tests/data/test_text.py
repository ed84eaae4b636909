"""Sequences cut from a file of tokens."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.data import TokenSequences, count_tokens


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens") / "tokens.bin"


@given(tokens=st.integers(2, 300), length=st.integers(1, 40), dtype=st.sampled_from(["uint8", "uint16", "uint32"]))
def test_every_token_but_a_tail_is_learned_from_once(path: Path, tokens: int, length: int, dtype: str) -> None:
    values = np.arange(tokens).astype(dtype)
    values.tofile(path)
    sequences = TokenSequences(path, dtype, length)
    assert len(sequences) == (tokens - 1) // length
    samples = [sequences[index] for index in range(len(sequences))]
    inputs = torch.cat([sample[0] for sample in samples] or [torch.empty(0, dtype=torch.int64)])
    targets = torch.cat([sample[1] for sample in samples] or [torch.empty(0, dtype=torch.int64)])
    used = len(sequences) * length
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == values[:used].tolist()
    assert targets.tolist() == values[1 : used + 1].tolist()


def test_padding_counts_nowhere(path: Path) -> None:
    np.zeros(21, dtype=np.uint16).tofile(path)
    inputs, targets = TokenSequences(path, "uint16", 10)[2]
    assert inputs.shape == (10,)
    assert targets.tolist() == [-100] * 10


def test_a_worker_gets_the_path_and_not_the_tokens(path: Path) -> None:
    np.arange(100_000, dtype=np.uint32).tofile(path)
    sequences = TokenSequences(path, "uint32", 10)
    sent = pickle.dumps(sequences)
    assert len(sent) < 1000
    assert pickle.loads(sent)[7][0].tolist() == sequences[7][0].tolist() == list(range(70, 80))


def test_tokens_of_a_batch_are_counted() -> None:
    assert count_tokens((torch.zeros(8, 128), torch.zeros(8, 128))) == 1024
