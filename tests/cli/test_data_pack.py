"""data pack and data show of a packed set, typed as a user types them."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from tests.data.packing import class_folders

from azureml_strategy.cli import main


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    try:
        code = main(["data", *map(str, words)])
    except SystemExit as stop:
        code = int(str(stop.code))
    told = capsys.readouterr()
    return code, told.out, told.err


def test_pack_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class_folders(tmp_path / "src" / "train", {"cat": 5, "dog": 4})
    class_folders(tmp_path / "src" / "val", {"cat": 2, "dog": 2})
    out = tmp_path / "out"
    code, told, _ = run(capsys, "pack", tmp_path / "src", out, "--resize", 24, "--workers", 1)
    assert code == 0
    assert told.startswith(f"{out}/train: 9 samples in 1 shard(s), ")
    code, told, _ = run(capsys, "show", out)
    assert code == 0
    assert f"{out}/val" in told
    assert "1 shard(s) and 9 record(s) are as the index says." in told
    shard = out / "train" / "train-000000.tar"
    content = shard.read_bytes()
    shard.write_bytes(content.replace(b"\xff\xd8\xff", b"\xff\xd8\xfe"))
    code, told, _ = run(capsys, "show", out / "train")
    assert code == 1
    assert "9 damaged:\n  train-000000.tar, byte 512: its bytes do not have the checksum" in told
    assert "and 4 more" in told
    shard.write_bytes(content[:-1])
    code, told, _ = run(capsys, "show", out / "train", "--quick")
    assert code == 1
    assert "1 damaged:\n  train-000000.tar has " in told


def test_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "src").mkdir()
    for number in range(3):
        (tmp_path / "src" / f"{number}.md").write_text("words " * 100)
    words = ("pack", tmp_path / "src", tmp_path / "out", "--text", "--workers", 1)
    code, _, told = run(capsys, *words)
    assert code == 2
    assert "no file '*.txt'" in told
    assert "data.pattern is --pattern" in told
    code, told, _ = run(capsys, *words, "--pattern", "*.md")
    assert (code, told.count("1 samples in 1 shard(s)")) == (0, 2)


def test_what_was_left_out_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = class_folders(tmp_path / "src", {"cat": 5})
    for number in range(7):
        (source / "cat" / f"bad{number}.jpg").write_bytes(b"text")
    words = ("pack", source, tmp_path / "out", "--workers", 1, "--max-unreadable")
    code, told, error = run(capsys, *words, 3)
    assert (code, told) == (2, "")
    assert "7 of 12 images cannot be read so far" in error
    code, told, error = run(capsys, *words, 7)
    assert (code, error.count("left out, as it cannot be read: cat/bad")) == (0, 5)
    assert "and 2 more" in error


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--resize", "0"), "'0' is no number from 1"),
        (("--quality", "101"), "'101' is no number from 1 to 100"),
        (("--shard-size", "big"), "'big' is no number of bytes. Write one, as 500GB"),
        (("--validation-fraction", "1"), "is no number from 0 to less than 1"),
        (("--raw",), "--raw --resize 256"),
        (
            ("--text", "--resize", "9", "--raw"),
            "--resize, --raw is for images, but SRC is packed as text. Leave it out.",
        ),
        (("--tokenizer", "x"), "--tokenizer is for text, but SRC is packed as images. Leave it out, or add --text."),
    ],
)
def test_wrong_words(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], reason: str) -> None:
    source = class_folders(tmp_path / "src", {"cat": 2})
    code, _, error = run(capsys, "pack", source, tmp_path / "out", *words)
    assert code == 2
    assert reason in error
    assert not (tmp_path / "out").exists()


def test_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "pack", tmp_path / "none", tmp_path / "out")
    assert (code, "There is no folder" in error) == (2, True)
    code, _, error = run(capsys, "show", tmp_path / "none")
    assert (code, "cannot be listed: No such file or directory" in error) == (2, True)
    source = class_folders(tmp_path / "src", {"cat": 2})
    code, _, error = run(capsys, "pack", source, source / "out")
    assert (code, "Give a folder outside of it" in error) == (2, True)


def test_a_terminal_shows_a_bar(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "src", {"cat": 5})
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "azureml_strategy.cli", "data", "pack", str(source), str(tmp_path / "out")]
    told = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, check=True, timeout=120).stdout
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "Packing images" in shown
    assert "5/5" in shown
    assert told.count("\n") == 1
