"""Files of /sys and /proc in every state they can be in; this runs as root too, whom no permission stops."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.network.sysfs import entries, read_number, read_text


def test_the_text_is_read_without_its_blanks(tmp_path: Path) -> None:
    file = tmp_path / "state"
    file.write_text("  4: ACTIVE \n")
    assert read_text(file) == "4: ACTIVE"


def test_an_empty_file_is_not_an_absent_one(tmp_path: Path) -> None:
    file = tmp_path / "empty"
    file.touch()
    assert read_text(file) == ""
    assert read_number(file) is None


def unreadable(folder: Path) -> list[Path]:
    """A folder, a dangling link, a link to itself, a file that is not there, and one below a file."""
    (folder / "folder").mkdir()
    (folder / "dangling").symlink_to(folder / "gone")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "file").touch()
    return [folder / name for name in ("folder", "dangling", "loop", "absent", "file/below", "n" * 300)]


def test_what_cannot_be_read_counts_as_absent(tmp_path: Path) -> None:
    for path in unreadable(tmp_path):
        assert (read_text(path), read_number(path)) == (None, None)


def test_a_kernel_that_refuses_to_read_counts_as_absent() -> None:
    assert read_text(Path("/proc/self/mem")) is None  # opens, and its first page gives EIO


@pytest.mark.skipif(os.geteuid() == 0, reason="no permission stops root")
def test_a_forbidden_file_counts_as_absent(tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch(0o000)
    folder.mkdir(0o000)
    assert read_text(file) is None
    assert entries(folder) == []


def test_an_endless_file_is_read_in_part() -> None:
    assert read_text(Path("/dev/zero")) == "\0" * 65536


@pytest.mark.parametrize(
    ("text", "base", "number"),
    [
        ("12", 10, 12),
        ("-1\n", 10, -1),
        ("0x8001", 16, 0x8001),
        ("7fff", 16, 0x7FFF),
        ("1.5", 10, None),
        ("x", 16, None),
    ],
)
def test_numbers(tmp_path: Path, text: str, base: int, number: int | None) -> None:
    file = tmp_path / "number"
    file.write_text(text)
    assert read_number(file, base) == number


@given(st.binary(max_size=64))
def test_no_content_raises(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.write_bytes(content)
        assert isinstance(read_text(file), str)
        assert isinstance(read_number(file), int | None)
        assert isinstance(read_number(file, 16), int | None)


def test_a_number_longer_than_python_converts(tmp_path: Path) -> None:
    file = tmp_path / "number"
    file.write_text("9" * 5000)
    assert read_number(file) is None


def test_entries_are_sorted_and_need_a_folder(tmp_path: Path) -> None:
    paths = unreadable(tmp_path)
    assert [path.name for path in entries(tmp_path)] == ["dangling", "file", "folder", "loop"]
    assert all(entries(path) == [] for path in paths)
