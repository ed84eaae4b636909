from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.network.transport.source import MAX_LINE, PIECE, read_lines

MEBIBYTE = 1 << 20
FORMS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "bytes": str.encode,
    "text stream": io.StringIO,
    "binary stream": lambda text: io.BytesIO(text.encode()),
    "lines": lambda text: iter(text.split("\n")),
}


def lines(log: Any) -> list[str]:
    return [line for some in read_lines(log) for line in some]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_log(form: str) -> None:
    text = "first\nsecond \u2588\n" + "x" * (PIECE - 20) + "\nüöä\nlast"
    assert [line for line in lines(FORMS[form](text)) if line] == text.split("\n")


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"first\r\nsecond\r\n")
    assert [line for line in lines(path) if line] == ["first", "second"]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lines(tmp_path / "none")


def test_a_str_is_never_a_path(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("content")
    assert lines(str(path)) == [str(path)]


def test_progress_bars_end_lines() -> None:
    assert lines("  0%|\r 50%|\r100%|host NCCL\n") == ["  0%|", " 50%|", "100%|host NCCL", ""]


def test_a_character_between_two_pieces() -> None:
    text = "x" * (PIECE - 1) + "ü"
    assert lines(io.BytesIO((text + "\nend").encode()))[-1] == "end"


@given(st.text(max_size=300))
def test_no_character_of_a_log_is_lost(text: str) -> None:
    assert lines(text) == text.replace("\r", "\n").split("\n")


@given(st.binary(max_size=300))
def test_bytes_of_any_kind(content: bytes) -> None:
    assert lines(io.BytesIO(content)) == lines(content)


@pytest.mark.parametrize(
    ("content", "mebibytes"), [(b"x", 30), (b"\0", 30), (b"\xff", 30), (b"a line of text\n" * 20, 12), (b"\r", 3)]
)
def test_memory_is_bounded(content: bytes, mebibytes: int, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(content * (mebibytes * MEBIBYTE // len(content)))
    tracemalloc.start()
    longest = max(len(line) for some in read_lines(path) for line in some)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert longest <= MAX_LINE + PIECE
    assert peak < 10 * MEBIBYTE
