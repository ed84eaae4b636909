from __future__ import annotations

from pathlib import Path

import pytest

from azureml_strategy.jobs import snapshot
from azureml_strategy.jobs.errors import JobError
from azureml_strategy.jobs.snapshot import list_snapshot


def write(*names: str) -> None:
    for name in names:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("12345")


def test_amlignore_is_respected_and_goes_before_gitignore() -> None:
    write("train.py", "data/a.bin", "logs/b.txt", "src/c.py", "src/c.pyc")
    Path(".gitignore").write_text("*.py\n")
    assert set(list_snapshot(".").files) == {".gitignore", "data/a.bin", "logs/b.txt", "src/c.pyc"}
    Path(".amlignore").write_text("data/\nlogs/*\n*.pyc\n")
    found = list_snapshot(".")
    assert set(found.files) == {".amlignore", ".gitignore", "train.py", "src/c.py"}
    assert found.size == sum(Path(name).stat().st_size for name in found.files)
    assert found.describe() == "code: ., 4 files, 0.0 MB"
    assert found.advice() is None


def test_what_hardly_belongs_there_is_named() -> None:
    write("train.py", ".git/HEAD", "outputs/run/last.ckpt", "lib/site-packages/a.py")
    assert list_snapshot(".").unwanted() == [".git", "site-packages", "outputs"]
    advice = list_snapshot(".").advice() or ""
    assert ".git, site-packages, outputs among them. Name what it does not need in ./.amlignore." in advice


def test_a_large_one_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.py", "b.py")
    monkeypatch.setattr(snapshot, "MANY_FILES", 1)
    assert list_snapshot(".").advice() == "The job gets all of it. Name what it does not need in ./.amlignore."


def test_an_empty_one_is_refused() -> None:
    Path("empty").mkdir()
    with pytest.raises(JobError, match=r"job\.code is empty, which holds no file"):
        list_snapshot("empty")
