"""Which files are documents, and how they are split."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.data import CorpusError
from azureml_strategy.data.corpus import Corpus, find_corpus


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
