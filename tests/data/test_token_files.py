"""Token files: whole or not there, whoever writes."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from azureml_strategy.data import CorpusError
from azureml_strategy.data.corpus import Corpus, find_corpus
from azureml_strategy.data.token_files import map_tokens, read_manifest, token_folder, write_tokens
from azureml_strategy.data.tokenizer import ByteTokenizer, Tokens

_FORK = multiprocessing.get_context("fork")


class _Slow(ByteTokenizer):
    """Stops in the middle of a corpus until it is told to go on."""

    def __init__(self) -> None:
        self.half, self.go_on = _FORK.Event(), _FORK.Event()

    def encode(self, document: Path) -> Tokens:
        if document.name == "7.txt":
            self.half.set()
            self.go_on.wait()
        return super().encode(document)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (tmp_path / "texts").mkdir()
    for number in range(10):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number}" * (number + 1))
    return find_corpus(tmp_path / "texts", None, "*.txt", {})


def _bytes(paths: list[Path]) -> bytes:
    return b"".join(path.read_bytes() + b"\0" for path in paths)


def test_files_hold_the_documents_in_order(corpus: Corpus, tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens", corpus, ByteTokenizer(), 0.3)
    files = read_manifest(tmp_path / "tokens")
    train, validation = corpus.split(0.3)
    assert map_tokens(files.path("train"), files.dtype).tobytes() == _bytes(train)
    assert map_tokens(files.path("val"), files.dtype).tobytes() == _bytes(validation)
    assert (files.train, files.val, files.dtype) == (len(_bytes(train)), len(_bytes(validation)), "uint8")
    assert sorted(os.listdir(tmp_path)) == ["texts", "tokens"]


def test_the_folder_follows_text_tokenizer_and_split(corpus: Corpus, tmp_path: Path) -> None:
    folder = token_folder(tmp_path, corpus, ByteTokenizer(), 0.3)
    assert token_folder(tmp_path, corpus, ByteTokenizer(), 0.3) == folder
    assert token_folder(tmp_path, corpus, ByteTokenizer(), 0.2) != folder
    corpus.documents[3].write_text("changed")
    assert token_folder(tmp_path, corpus, ByteTokenizer(), 0.3) != folder


@pytest.fixture
def writer(corpus: Corpus, tmp_path: Path) -> Iterator[tuple[BaseProcess, _Slow]]:
    """Another process that has written half of the tokens."""
    tokenizer = _Slow()
    process = _FORK.Process(target=write_tokens, args=(tmp_path / "tokens", corpus, tokenizer, 0.0))
    process.start()
    assert tokenizer.half.wait(120)
    yield process, tokenizer
    process.kill()
    process.join()


def test_a_killed_writer_leaves_nothing_that_is_used(
    corpus: Corpus, tmp_path: Path, writer: tuple[BaseProcess, _Slow]
) -> None:
    process, _ = writer
    process.kill()
    process.join()
    assert not (tmp_path / "tokens").exists()
    write_tokens(tmp_path / "tokens", corpus, ByteTokenizer(), 0.0)
    assert read_manifest(tmp_path / "tokens").train == len(_bytes(list(corpus.documents)))


def test_of_writers_at_once_the_first_wins_and_the_others_use_its_files(
    corpus: Corpus, tmp_path: Path, writer: tuple[BaseProcess, _Slow]
) -> None:
    process, tokenizer = writer
    write_tokens(tmp_path / "tokens", corpus, ByteTokenizer(), 0.0)
    written = (tmp_path / "tokens" / "train.bin").stat()
    tokenizer.go_on.set()
    process.join()
    assert process.exitcode == 0
    assert (tmp_path / "tokens" / "train.bin").stat() == written
    assert sorted(os.listdir(tmp_path)) == ["texts", "tokens"]


def test_files_are_not_written_again(corpus: Corpus, tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens", corpus, ByteTokenizer(), 0.0)
    before = (tmp_path / "tokens" / "train.bin").stat()
    time.sleep(0.01)
    write_tokens(tmp_path / "tokens", corpus, ByteTokenizer(), 0.0)
    assert (tmp_path / "tokens" / "train.bin").stat() == before


def test_a_file_that_was_cut_is_an_error(corpus: Corpus, tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens", corpus, ByteTokenizer(), 0.0)
    whole = (tmp_path / "tokens" / "train.bin").read_bytes()
    (tmp_path / "tokens" / "train.bin").write_bytes(whole[:-1])
    size = len(whole)
    with pytest.raises(CorpusError, match=rf"has {size - 1} bytes, but its manifest says {size}.*rm -r "):
        read_manifest(tmp_path / "tokens")


def test_tokens_that_nobody_wrote_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"tokens holds no tokens, which one process of each node writes"):
        read_manifest(tmp_path / "tokens")


def test_the_digest_is_that_of_the_tokens(corpus: Corpus, tmp_path: Path) -> None:
    digests = []
    for name in ("first", "second", "changed"):
        write_tokens(tmp_path / name, corpus, ByteTokenizer(), 0.0)
        digests.append(json.loads((tmp_path / name / "manifest.json").read_text())["digest"])
        if name == "second":
            corpus.documents[0].write_text("?")
    assert digests[0] == digests[1]


def test_tokens_are_mapped_and_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate(2**40)  # a terabyte of zeros, none of which is on the disk
    tokens = map_tokens(tmp_path / "large.bin", "uint16")
    assert isinstance(tokens, np.memmap)
    assert tokens[2**38 : 2**38 + 3].tolist() == [0, 0, 0]
