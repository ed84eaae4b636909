from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.data import CorpusError
from azureml_strategy.data.tokens import (
    ByteTokenizer,
    Corpus,
    FileTokenizer,
    Tokens,
    find_corpus,
    map_tokens,
    read_manifest,
    token_folder,
    write_tokens,
)

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


@pytest.mark.parametrize("limit", [{"max_length": 4}, {"length": 100}])
def test_a_document_is_read_whole_whatever_length_was_saved_with_the_tokenizer(
    trained: Path, tmp_path: Path, limit: dict[str, int]
) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question")
    expected = FileTokenizer(trained, None).encode(tmp_path / "a.txt").tolist()
    limited = tokenizers.Tokenizer.from_file(str(trained))
    (limited.enable_truncation if "max_length" in limit else limited.enable_padding)(**limit)
    limited.save(str(tmp_path / "limited.json"))
    assert FileTokenizer(tmp_path / "limited.json", None).encode(tmp_path / "a.txt").tolist() == expected
    before = hashlib.sha256((tmp_path / "limited.json").read_bytes() + b"\0None").hexdigest()
    assert FileTokenizer(tmp_path / "limited.json", None).identity != before  # of the tokens that were cut


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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "notes.md", ".hidden.txt", ".git/d.txt"):
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(name)
    (tmp_path / "texts" / "empty.txt").touch()
    return tmp_path / "texts"


def names(corpus: Corpus) -> list[str]:
    return [str(path.relative_to(corpus.root)) for path in corpus.documents]


def test_the_default_is_the_standard_library_without_its_tests() -> None:
    corpus = find_corpus(None, None, "*.txt", {})
    found = names(corpus)
    assert corpus.root == Path(sysconfig.get_path("stdlib"))
    assert {"argparse.py", "json/decoder.py"} < set(found)
    assert found == [str(path) for path in sorted(map(Path, found))]
    assert not [name for name in found if "site-packages" in name or name.startswith("test/")]
    assert find_corpus(None, None, "*.txt", {}).identity() == corpus.identity()


def test_a_folder_is_searched_to_the_bottom_by_a_pattern(folder: Path) -> None:
    assert names(find_corpus(folder, None, "*.txt", {})) == ["a.txt", "b.txt", "deep/er/c.txt"]
    assert names(find_corpus(folder, None, "*.md", {})) == ["notes.md"]
    assert find_corpus(folder / "a.txt", None, "*.md", {}).documents == (folder / "a.txt",)
    assert find_corpus(None, "books", "*.md", {"AZURE_ML_INPUT_books": str(folder)}).root == folder


def test_a_change_of_any_document_is_another_identity(folder: Path) -> None:
    identities = {find_corpus(folder, None, "*.txt", {}).identity()}
    (folder / "a.txt").write_text("changed")
    identities.add(find_corpus(folder, None, "*.txt", {}).identity())
    os.utime(folder / "a.txt", ns=(1, 1))
    identities.add(find_corpus(folder, None, "*.txt", {}).identity())
    (folder / "b.txt").rename(folder / "z.txt")
    identities.add(find_corpus(folder, None, "*.txt", {}).identity())
    assert len(identities) == 4


@given(st.integers(2, 60), st.floats(0, 0.9))
def test_every_document_is_in_exactly_one_part(total: int, fraction: float) -> None:
    documents = tuple(Path(f"/x/{number:03}.txt") for number in range(total))
    corpus = Corpus(Path("/x"), documents)
    if fraction and max(1, round(total * fraction)) >= total:
        return
    train, validation = corpus.split(fraction)
    assert sorted([*train, *validation]) == list(documents)
    assert len(validation) == (max(1, round(total * fraction)) if fraction else 0)
    assert corpus.split(fraction) == (train, validation)


def test_a_single_document_cannot_be_split(folder: Path) -> None:
    corpus = find_corpus(folder / "a.txt", None, "*.txt", {})
    with pytest.raises(CorpusError, match=r"has 1 document\(s\).*takes 1 for validation.*validation_fraction=0"):
        corpus.split(0.05)
    assert corpus.split(0.0) == ([folder / "a.txt"], [])


@pytest.mark.parametrize(
    ("root", "pattern", "words"),
    [
        ("texts", "*.rst", "texts has no file '*.rst'"),
        ("texts", "empty.*", "1 file(s) that match 'empty.*', all of them empty"),
        ("text", "*.txt", "There is no folder or file"),
    ],
)
def test_no_text_is_an_error(folder: Path, root: str, pattern: str, words: str) -> None:
    with pytest.raises(CorpusError) as error:
        find_corpus(folder.parent / root, None, pattern, {})
    assert words in str(error.value)
    assert "data.root=" in str(error.value)
