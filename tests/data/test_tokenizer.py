"""Bytes, and a real tokenizer trained here."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.data import CorpusError
from azureml_strategy.data.tokenizer import ByteTokenizer, FileTokenizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer of 300 tokens, and one more that was added later, with a gap before it."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["the cat sat on the mat, the rat on the hat"] * 9, vocab_size=300, min_frequency=1)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@given(content=st.binary(max_size=200))
def test_bytes_are_tokens_whatever_they_are(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    document = tmp_path_factory.getbasetemp() / "any.bin"
    document.write_bytes(content)
    tokens = ByteTokenizer().encode(document)
    assert tokens.dtype == ByteTokenizer().dtype == np.uint8
    assert tokens.tobytes() == content + b"\0"


def test_a_tokenizer_file(trained: Path, tmp_path: Path) -> None:
    document = tmp_path / "a.txt"
    document.write_text("the cat säß on the mat")
    tokenizer = FileTokenizer(trained, "<|endoftext|>")
    tokens = tokenizer.encode(document)
    library = tokenizers.Tokenizer.from_file(str(trained))
    assert library.decode(tokens.tolist()) == "the cat säß on the mat"
    assert tokens[-1] == library.token_to_id("<|endoftext|>") < tokenizer.vocab_size
    assert tokens.dtype == np.uint16
    assert len(tokens) < len(document.read_bytes())
    assert FileTokenizer(trained, None).encode(document).tolist() == tokens[:-1].tolist()
    assert FileTokenizer(trained, None).identity != tokenizer.identity


def test_text_in_another_encoding_is_an_error_that_names_the_place(trained: Path, tmp_path: Path) -> None:
    document = tmp_path / "latin.txt"
    document.write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(CorpusError, match=r"latin.txt is not UTF-8: byte 0xe9 at 3\..*data.tokenizer=null"):
        FileTokenizer(trained, None).encode(document)


def test_what_is_missing_is_named(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"There is no tokenizer file .*none\.json"):
        FileTokenizer(tmp_path / "none.json", None)
    with pytest.raises(CorpusError, match=r"has no token '</s>'\. Set data.end_of_text"):
        FileTokenizer(trained, "</s>")


def test_the_library_is_asked_for_only_where_it_is_needed(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(CorpusError, match=r"needs the `tokenizers` library, .*`pip install tokenizers`"):
        FileTokenizer(trained, None)
    (tmp_path / "a.txt").write_text("a")
    assert ByteTokenizer().encode(tmp_path / "a.txt").tolist() == [97, 0]
