"""Tars and folders that somebody else may have made: each ends in a packed set or in one sentence, and soon."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.data.photographs import photograph
from tests.memory import peak_of

from azureml_strategy.cli import main
from azureml_strategy.data.shard_index import ShardIndexError, load_index
from azureml_strategy.data.tar_index import index_tars

MIB = 2**20


def jpeg() -> bytes:
    file = io.BytesIO()
    photograph(16, 16).save(file, "JPEG")
    return file.getvalue()


IMAGE = jpeg()


def header(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    """A header of a tar with fields of any bytes, and the right checksum."""
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108], block[124:136], block[156:157] = b"0000644\0", size.ljust(12, b"\0")[:12], kind
    block[257:265] = b"ustar\00000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def octal(size: int) -> bytes:
    return b"%011o\0" % size


def binary(size: int) -> bytes:
    """A size of base 256, as GNU's tar writes large and negative ones."""
    return (b"\xff" if size < 0 else b"\x80") + (size % 256**11).to_bytes(11, "big")


def file(name: bytes, content: bytes, kind: bytes = b"0") -> bytes:
    return header(name, octal(len(content)), kind) + content + bytes(-len(content) % 512)


def pax(**records: str) -> bytes:
    body = b""
    for name, value in records.items():
        line = f" {name.replace('__', '.')}={value}\n".encode("utf-8", "surrogateescape")
        length = len(line) + 1
        while len(str(length)) + len(line) != length:
            length = len(str(length)) + len(line)
        body += str(length).encode() + line
    return file(b"pax", body, b"x")


SAMPLE = file(b"1.jpg", IMAGE) + file(b"1.cls", b"0")
END = bytes(1024)
REFUSED: dict[str, bytes] = {
    "a label of two billion": file(b"1.jpg", IMAGE) + file(b"1.cls", b"2000000000") + END,
    "a label of 5,000 digits": file(b"1.jpg", IMAGE) + file(b"1.cls", b"1" * 5000) + END,
    "a label in deep JSON": file(b"1.jpg", IMAGE) + file(b"1.json", b"[" * 100_000) + END,
    "a negative label": file(b"1.jpg", IMAGE) + file(b"1.cls", b"-1") + END,
    "a huge size": SAMPLE + header(b"2.jpg", binary(2**62)) + END,
    "a size beyond 64 bits": SAMPLE + header(b"2.jpg", binary(2**80)) + END,
    "a negative size": SAMPLE + header(b"2.jpg", binary(-512)) + END,
    "a negative size of a header": SAMPLE + header(b"pax", binary(-1024), b"x") + END,
    "a huge header of pax": SAMPLE + header(b"pax", binary(2**40), b"x") + END,
    "a huge long name": SAMPLE + header(b"././@LongLink", binary(2**62), b"L") + END,
    "a header of pax within a header": pax(path="a.jpg") * 3000 + SAMPLE + END,
    "a sparse file": pax(GNU__sparse__major="1", GNU__sparse__minor="0", GNU__sparse__name="2.jpg") + SAMPLE + END,
    "a sparse file of words": pax(GNU__sparse__map="a,b", GNU__sparse__size="x") + SAMPLE + END,
    "a size of words": pax(size="many") + SAMPLE + END,
    "a second image": SAMPLE + file(b"\x1b[2J1.JPG", IMAGE) + file(b"1.jpg", IMAGE) + END,
    "a label alone": SAMPLE + file(b"\xff\xfe\n.cls", b"1") + END,
    "no image": file(b"../../x.txt", b"1") + END,
    "nothing": b"",
    "half a header": SAMPLE[:100],
    "cut": SAMPLE[:700],
    "links": header(b"1.jpg", octal(0), b"2") + file(b"1.cls", b"0") + END,
    "gzip": b"\x1f\x8b" + bytes(600),
    "noise": bytes(range(256)) * 8,
}
READ: dict[str, bytes] = {
    "names that lead out": file(b"../../1.jpg", IMAGE) + file(b"../../1.cls", b"0") + END,
    "absolute names": file(b"/etc/1.jpg", IMAGE) + file(b"/etc/1.cls", b"0") + END,
    "names of any bytes": file(b"\xff\n\x1b.jpg", IMAGE) + file(b"\xff\n\x1b.cls", b"0") + END,
    "devices and links beside": SAMPLE + header(b"dev", octal(0), b"3") + header(b"fifo", octal(0), b"6") + END,
    "a long name": pax(path="a" * 5000 + ".jpg")
    + file(b"x", IMAGE)
    + pax(path="a" * 5000 + ".cls")
    + file(b"x", b"0")
    + END,
}


def told(capsys: Any, *words: str) -> tuple[int, str]:
    """Run a command; its exit code, and what it says on standard error."""
    capsys.readouterr()
    code = main(list(words))
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return code, captured.err


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_a_hostile_tar_ends_in_one_sentence(kind: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.tar").write_bytes(REFUSED[kind])
    with peak_of(64 * MIB), pytest.raises(ShardIndexError, match=r"tar") as caught:
        index_tars(tmp_path / "set")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 700
    for words in (["show", "--quick"], ["pack", str(tmp_path / "out")], ["pack", "--raw", str(tmp_path / "raw")]):
        verb, *others = words
        code, error = told(capsys, "data", verb, str(tmp_path / "set"), *others, *_one(verb))
        assert code == 2, error
        assert error.startswith("azureml-strategy: ")
        assert error.count("\n") == 1


def _one(verb: str) -> list[str]:
    return ["--workers", "1"] if verb == "pack" else []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", READ)
def test_odd_names_in_a_tar_are_read_and_lead_nowhere(kind: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.tar").write_bytes(READ[kind])
    before = set(tmp_path.rglob("*"))
    code, error = told(capsys, "data", "pack", str(tmp_path / "set"), str(tmp_path / "out"), "--workers", "1")
    assert code == 0, error
    assert len(load_index(tmp_path / "out" / "index.npz")) == 1
    made = set(tmp_path.rglob("*")) - before
    assert all(path.is_relative_to(tmp_path / "out") for path in made)
    assert told(capsys, "data", "show", str(tmp_path / "out"))[0] == 0


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "class" / "2.jpg")


def _dangling(folder: Path) -> None:
    (folder / "class" / "2.jpg").symlink_to(folder / "gone")


def _device(folder: Path) -> None:
    (folder / "class" / "2.jpg").symlink_to("/dev/zero")


def _folder(folder: Path) -> None:
    (folder / "class" / "2.jpg").mkdir()


def _bytes(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder / "class") + b"/\xff\n-2.jpg")).write_bytes(IMAGE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("odd", [_pipe, _dangling, _device, _folder, _bytes])
def test_odd_files_of_a_class_are_passed_over_or_read(odd: Callable[[Path], None], tmp_path: Path, capsys: Any) -> None:
    source = tmp_path / "-source"
    (source / "class").mkdir(parents=True)
    (source / "class" / "1.jpg").write_bytes(IMAGE)
    odd(source)
    code, error = told(capsys, "data", "pack", str(source), str(tmp_path / "out"), "--workers", "1")
    assert code == 0, error
    assert len(load_index(tmp_path / "out" / "index.npz")) == (2 if odd is _bytes else 1)


@pytest.mark.parametrize("name", [b"\xff\xfe", b"a\nb", b"\x1b[2J"])
def test_a_class_whose_name_is_no_line_is_refused(name: bytes, tmp_path: Path, capsys: Any) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path / "source") + b"/" + name))
    folder.mkdir(parents=True)
    (folder / "1.jpg").write_bytes(IMAGE)
    code, error = told(capsys, "data", "pack", str(tmp_path / "source"), str(tmp_path / "out"))
    assert (code, error.count("\n")) == (2, 1)
    assert "the names of classes are lines of a text" in error


@pytest.mark.parametrize("name", [b"\xff.tar", b"a\nb.tar", b"-a.tar", b"a b.tar"])
def test_a_shard_of_an_odd_name(name: bytes, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "set").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path / "set") + b"/" + name)).write_bytes(SAMPLE + END)
    code, error = told(capsys, "data", "show", str(tmp_path / "set"))
    assert code == (0 if os.fsdecode(name).isprintable() else 2)
    assert error.count("\n") <= 1 or code == 0


@pytest.mark.parametrize("kind", ["folder", "pipe", "classes.txt"])
def test_what_is_no_shard_in_a_set(kind: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "set").mkdir()
    if kind == "folder":
        (tmp_path / "set" / "a.tar").mkdir()
    elif kind == "pipe":
        os.mkfifo(tmp_path / "set" / "a.tar")
    else:
        (tmp_path / "set" / "a.tar").write_bytes(SAMPLE + END)
        (tmp_path / "set" / "classes.txt").write_bytes(b"\xff\xfe")
    for words in (["show"], ["pack", str(tmp_path / "out")]):
        verb, *others = words
        code, error = told(capsys, "data", verb, str(tmp_path / "set"), *others, *_one(verb))
        assert (code, error.count("\n")) == (2, 1), error


def test_python_reads_the_same_files(tmp_path: Path) -> None:
    """The tars here are tars."""
    for content in READ.values():
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            assert len(tar.getmembers()) >= 2
