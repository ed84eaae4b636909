"""The file of compiled code: what it holds, and which ones are not read."""

from __future__ import annotations

import io
import json
import os
import platform
import tarfile
from collections.abc import Callable
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from azureml_strategy.files import OutsideError
from azureml_strategy.strategies.compilation import cache_file
from azureml_strategy.strategies.compilation.cache_file import (
    UnfitError,
    compiled_files,
    conditions,
    is_trusted,
    newest,
    read_cache,
    write_cache,
)

CPU = torch.device("cpu")
HERE = {"torch": "2.13", "CPU": "x86_64"}
CODE = {"fxgraph/ab/key": b"graph", "cd/kernel.so": b"library" * 99}


def put(folder: Path, **files: bytes) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A file with CODE, in the run's output."""
    folder, path = put(tmp_path / "compiled", **CODE), tmp_path / "root" / "compile_cache" / "node0.bin"
    write_cache(path, folder, compiled_files(folder), HERE)
    return path


def test_there_and_back(kept: Path, tmp_path: Path) -> None:
    assert sorted(read_cache(kept, tmp_path / "again", HERE)) == sorted(CODE)
    assert content_of(tmp_path / "again") == CODE
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    assert [each.name for each in kept.parent.iterdir()] == ["node0.bin"]


def test_what_is_there_stays(kept: Path, tmp_path: Path) -> None:
    """Another process may have loaded it."""
    (library,) = put(tmp_path / "again", **{"cd/kernel.so": b"in use"}).rglob("*.so")
    read_cache(kept, tmp_path / "again", HERE)
    assert library.read_bytes() == b"in use"


def of_header(change: Callable[[dict[str, object]], object]) -> Callable[[bytes], bytes]:
    def changed(whole: bytes) -> bytes:
        head, _, packed = whole.partition(b"\n")
        header = json.loads(head)
        change(header)
        return json.dumps(header).encode() + b"\n" + packed

    return changed


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "nothing": (lambda whole: b"", "no header of ours"),
    "another file": (lambda whole: os.urandom(999), "no header of ours"),
    "nested": (lambda whole: b"[" * 100_000, "no header of ours"),
    "a list": (lambda whole: b"[1]\n", "no header of ours"),
    "cut in the header": (lambda whole: whole[:40], "no header of ours"),
    "cut": (lambda whole: whole[:-1], "checksum is wrong"),
    "a bit": (lambda whole: whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], "checksum is wrong"),
    "of a later version": (of_header(lambda header: header.update(format=2)), "format 2, and this version reads 1"),
    "no archive": (
        lambda whole: of_header(lambda header: header.update(sha256=sha256(b"x").hexdigest()))(
            whole.partition(b"\n")[0] + b"\nx"
        ),
        "it holds no compiled code",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged(kept: Path, tmp_path: Path, case: str) -> None:
    change, said = DAMAGED[case]
    kept.write_bytes(change(kept.read_bytes()))
    with pytest.raises(UnfitError, match=said):
        read_cache(kept, tmp_path / "again", HERE)
    assert not (tmp_path / "again").exists()


def test_each_length(kept: Path, tmp_path: Path) -> None:
    """A writer that dies leaves what it has written so far, on a mount without atomic renames."""
    whole = kept.read_bytes()
    for length in range(0, len(whole), 7):
        kept.write_bytes(whole[:length])
        with pytest.raises(UnfitError):
            read_cache(kept, tmp_path / "again", HERE)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({**HERE, "torch": "2.14"}, "it is for torch '2.13', and here is '2.14'"),
        ({**HERE, "GPU": "H100 9.0"}, "it is for GPU None, and here is 'H100 9.0'"),
        ({"torch": "2.13"}, "it is for CPU 'x86_64', and here is None"),
    ],
)
def test_for_something_else(kept: Path, tmp_path: Path, there: dict[str, str], said: str) -> None:
    with pytest.raises(UnfitError, match=said):
        read_cache(kept, tmp_path / "again", there)
    assert not (tmp_path / "again").exists()


def archive(*entries: tarfile.TarInfo) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as written:
        for each in entries:
            written.addfile(each, io.BytesIO(bytes(each.size)))
    return content.getvalue()


def entry(name: str, size: int = 3, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.size, found.type, found.linkname = size, kind, link
    return found


HOSTILE = {
    "upwards": entry("../outside"),
    "absolute": entry("/tmp/outside"),
    "a link": entry("inside", 0, tarfile.SYMTYPE, "/etc/passwd"),
    "a device": entry("inside", 0, tarfile.CHRTYPE),
    "a pipe": entry("inside", 0, tarfile.FIFOTYPE),
    "too large": entry("inside", 1001),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_no_run_has_written(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(cache_file, "MOST_BYTES", 1000)
    packed = archive(HOSTILE[case])
    header = {"format": 1, "sha256": sha256(packed).hexdigest(), "conditions": HERE}
    kept.write_bytes(json.dumps(header).encode() + b"\n" + packed)
    with pytest.raises(UnfitError):
        read_cache(kept, tmp_path / "again" / "deep", HERE)
    assert content_of(tmp_path / "again") == {}


def test_a_file_that_is_too_large_is_not_read(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_file, "MOST_BYTES", 10)
    os.truncate(kept, 10 + (64 << 10) + 1)
    with pytest.raises(UnfitError, match=r"it has 65,547 bytes, and at most 10 are written"):
        read_cache(kept, tmp_path / "again", HERE)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("elsewhere", path)])
def test_no_file(kept: Path, tmp_path: Path, make: Callable[[Path], None]) -> None:
    kept.rename(kept.with_name("elsewhere"))
    make(kept)
    with pytest.raises(UnfitError, match="it is no file"):
        read_cache(kept, tmp_path / "again", HERE)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to(kept: Path, tmp_path: Path, mode: int) -> None:
    kept.parent.chmod(mode)
    with pytest.raises(OutsideError, match="compile_cache belongs to somebody else, or others may write to it"):
        read_cache(kept, tmp_path / "again", HERE)
    with pytest.raises(OutsideError, match="not a folder that belongs to this user alone"):
        write_cache(kept, tmp_path / "compiled", [], HERE)


def test_a_folder_of_another_user(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: kept.stat().st_uid + 1)
    with pytest.raises(OutsideError):
        read_cache(kept, tmp_path / "again", HERE)


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_a_file_that_others_may_write_to(kept: Path, tmp_path: Path, mode: int) -> None:
    """They may have written to it before the folder was made private, as a warning advises."""
    kept.chmod(mode)
    with pytest.raises(UnfitError, match="it belongs to somebody else, or others may write to it"):
        read_cache(kept, tmp_path / "again", HERE)
    assert not (tmp_path / "again").exists()


def test_a_file_of_another_user(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_file, "is_private", lambda folder: True)
    monkeypatch.setattr(os, "getuid", lambda: kept.stat().st_uid + 1)
    with pytest.raises(UnfitError, match="it belongs to somebody else"):
        read_cache(kept, tmp_path / "again", HERE)


@pytest.mark.parametrize("umask", [0, 0o002])
def test_a_file_of_a_process_that_lets_others_write(kept: Path, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_cache(kept, tmp_path / "compiled", CODE, HERE)
    finally:
        os.umask(before)
    assert sorted(read_cache(kept, tmp_path / "again", HERE)) == sorted(CODE)


def test_a_link_to_a_folder(kept: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(kept.parent)
    assert (is_trusted(kept.parent), is_trusted(link), is_trusted(kept), is_trusted(tmp_path / "none")) == (
        *(True, False, False, False),
    )


@pytest.mark.parametrize(
    ("kind", "trusted"), [("fuse", True), ("fuse.blobfuse2", True), ("cifs", True), ("ext4", False)]
)
def test_on_a_mount_of_storage_owners_are_made_up(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, trusted: bool
) -> None:
    monkeypatch.setattr(cache_file, "filesystem_of", lambda folder: kind)
    kept.parent.chmod(0o777)
    kept.chmod(0o777)
    assert is_trusted(kept.parent) is trusted
    with nullcontext() if trusted else pytest.raises(OutsideError):
        read_cache(kept, tmp_path / "again", HERE)


def test_what_is_not_kept(tmp_path: Path) -> None:
    """What other processes are writing, and what only the compilers read."""
    put(tmp_path, **CODE, **{"ef/half.main.so": b"half", "ef/half.main_CxxBuild/i.o": b"", "locks/kernel.lock": b""})
    put(tmp_path, **{"cd/.12.34.tmp": b"", "triton/0/ab/k.cubin": b"", "ef/head.h": b"", "ef/head.h.gch": b""})
    (tmp_path / "cd" / "link.so").symlink_to("kernel.so")
    assert set(compiled_files(tmp_path)) == set(CODE)


def test_the_newest_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, old=b"12345", new=b"12345", newest=b"12345")
    for time, name in enumerate(("old", "new", "newest")):
        os.utime(tmp_path / name, (time, time))
    files = compiled_files(tmp_path)
    monkeypatch.setattr(cache_file, "MOST_BYTES", 14)
    assert newest(files) == ["newest", "new"]
    monkeypatch.setattr(cache_file, "MOST_BYTES", 15)
    assert newest(files) == ["newest", "new", "old"]


def test_the_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZUREML_RUN_ID", "quirky_plum")
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = conditions(CPU)
    assert (found["run"], found["C++ compiler"]) == ("quirky_plum", "none")
    assert str(torch.__version__) in found["torch"]


def test_a_library_for_another_cpu_would_end_the_process(tmp_path: Path) -> None:
    table = tmp_path / "cpuinfo"
    table.write_text("model name\t: EPYC\nflags\t\t: fpu avx2\n\nflags\t\t: other")
    few = cache_file._cpu(table)
    table.write_text("model name\t: EPYC\nflags\t\t: fpu avx2 avx512f\n")
    assert cache_file._cpu(table) != few
    assert " EPYC " in few
    assert cache_file._cpu(tmp_path / "none") == platform.machine()
