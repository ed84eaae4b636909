"""What a disk, a mount or the memory does wrong never becomes another sample: it is read to the end, or an error."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.data.conftest import WriteImages
from tests.data.packing import class_folders, packed, records
from tests.data.tar_sets import write_set

from azureml_strategy.data import EvaluationImages, ShardedImages, TrainingImages
from azureml_strategy.data.gpu_decoding import EncodedImages
from azureml_strategy.data.images import ImageFolder
from azureml_strategy.data.node_cache.client import CacheSettings
from azureml_strategy.data.packing.images import ImageForm
from azureml_strategy.data.pillow_images import is_damage
from azureml_strategy.data.shard_index import RecordError
from azureml_strategy.data.storage import FolderStorage, StorageError
from azureml_strategy.data.tokens import ByteTokenizer
from azureml_strategy.files import ShortReadError, read_range, read_whole
from azureml_strategy.huggingface.loading import open_slices

_SAMPLES = 4
Make = Callable[[Path, WriteImages], ImageFolder]


def _folders(root: Path, write_images: WriteImages) -> Path:
    write_images(root / "a", _SAMPLES)
    return root


def _shards(root: Path, write_images: WriteImages) -> Path:
    files = sorted(write_images(root / "files", _SAMPLES).iterdir())
    samples = [(file.name, file.read_bytes(), 0) for file in files]
    write_set(root / "set", [samples[:2], samples[2:]], ["a"])
    return root / "set"


KINDS: dict[str, Make] = {
    "training, folders": lambda root, write: TrainingImages(_folders(root, write), image_size=8),
    "validation, folders": lambda root, write: EvaluationImages(_folders(root, write), image_size=8),
    "training, shards": lambda root, write: TrainingImages(ShardedImages(_shards(root, write)), image_size=8),
    "validation, shards": lambda root, write: EvaluationImages(ShardedImages(_shards(root, write)), image_size=8),
}


@pytest.fixture(params=KINDS)
def images(request: pytest.FixtureRequest, tmp_path: Path, write_images: WriteImages) -> ImageFolder:
    return KINDS[request.param](tmp_path, write_images)


def _give_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount that gives at most 100 bytes at a time."""
    whole = os.pread
    monkeypatch.setattr(os, "pread", lambda file, length, offset: whole(file, min(length, 100), offset))


def _stopping(after: int) -> Callable[[int, int, int], bytes]:
    """A mount that ends each file after so many bytes, whatever it told of its size."""
    whole = os.pread
    return lambda file, length, offset: whole(file, max(0, min(length, after - offset)), offset)


@pytest.mark.filterwarnings("ignore:Image 0 was drawn a second time")
def test_a_read_that_gives_less_goes_on(images: ImageFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = images.__getitems__(range(_SAMPLES))
    _give_little(monkeypatch)
    found = images.__getitems__(range(_SAMPLES))
    assert torch.equal(found.images, expected.images)
    assert found.labels.tolist() == [0] * _SAMPLES
    assert not images.unreadable


def test_other_readers_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _give_little(monkeypatch)
    content = os.urandom(1000)
    (tmp_path / "file").write_bytes(content)
    assert read_whole(tmp_path / "file") == content
    assert FolderStorage(str(tmp_path))._read("file", 10, 900) == content[10:910]
    assert ByteTokenizer().encode(tmp_path / "file").tobytes() == content + b"\0"
    tensor = torch.randn(100, 3)
    save_file({"x": tensor}, tmp_path / "model.safetensors", {"y" * 200: "z"})
    with open_slices([tmp_path / "model.safetensors"]) as slices:
        assert torch.equal(slices["x"][...], tensor)
    source = class_folders(tmp_path / "source", {"cat": 3})
    index = packed(source, tmp_path / "packed")[""]
    assert sorted(records(tmp_path / "packed", index)) == sorted(
        each.read_bytes() for each in (source / "cat").iterdir()
    )


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_the_cache_of_the_node_goes_on(
    tmp_path: Path, write_images: WriteImages, meeting_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ShardedImages(_shards(tmp_path, write_images), cache=CacheSettings(tmp_path / "cache", 10_000_000))
    expected = source.read(range(_SAMPLES))
    asked = source.reader.statistics()["requests"]  # type: ignore[attr-defined]
    _give_little(monkeypatch)
    assert source.read(range(_SAMPLES)) == expected
    assert source.reader.statistics()["requests"] == asked, "nothing was damaged"  # type: ignore[attr-defined]
    source.close()


def test_a_file_that_gives_less_than_it_has_is_an_error(images: ImageFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pread", _stopping(200))
    with pytest.raises(StorageError, match=r"cannot be read \(.* of .* bytes came from byte [\d,]+ on, of a file of"):
        images[_SAMPLES - 1]
    assert not images.unreadable


def test_the_end_of_a_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    with (tmp_path / "file").open("rb") as file:
        assert read_range(file.fileno(), 20, 4) == b"456789"
        assert read_range(file.fileno(), 20, 40) == b""
        monkeypatch.setattr(os, "pread", _stopping(6))
        with pytest.raises(ShortReadError, match="2 of 5 bytes came from byte 4 on, of a file of 10 bytes") as raised:
            read_range(file.fileno(), 5, 4)
    assert raised.value.errno == errno.EIO


@pytest.mark.parametrize(
    "number", ["EIO", "ESTALE", "ETIMEDOUT", "ENOTCONN", "ENOSPC", "EHOSTDOWN", "EMFILE", "ENOMEM", "EREMOTEIO"]
)
def test_no_error_of_the_system_is_a_damaged_image(
    images: ImageFolder, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> bytes:
        raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))

    monkeypatch.setattr(os, "pread", fails)
    with pytest.raises(OSError, match=os.strerror(getattr(errno, number))):
        images[2]
    assert not images.unreadable


@pytest.mark.parametrize("kind", KINDS)
def test_a_mount_that_is_gone_takes_no_image_with_it(tmp_path: Path, write_images: WriteImages, kind: str) -> None:
    images = KINDS[kind](tmp_path / "mount", write_images)
    (tmp_path / "mount").rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"No such file or directory.*nothing was left out or replaced"):
        images[2]
    assert not images.unreadable


OF_MEMORY: dict[str, Exception] = {
    "Python": MemoryError(),
    "torch": RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
    "Pillow": OSError("out of memory when reading image file"),
    "a library that is not there": ModuleNotFoundError("No module named 'PIL.WebPImagePlugin'"),
    "a full disk of shared memory": OSError(errno.ENOSPC, "No space left on device"),
}


@pytest.mark.parametrize("of", OF_MEMORY)
def test_no_image_stands_in_where_memory_ran_out(images: ImageFolder, of: str) -> None:
    def decode(*arguments: Any) -> None:
        raise OF_MEMORY[of]

    images.decode = decode
    with pytest.raises(type(OF_MEMORY[of])):
        images[2]
    assert not images.unreadable


@pytest.mark.parametrize("of", OF_MEMORY)
def test_packing_leaves_none_out_for_it(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise OF_MEMORY[of]

    monkeypatch.setattr("azureml_strategy.data.packing.images.open_image", fails)
    with pytest.raises(type(OF_MEMORY[of])):
        ImageForm().encode(b"")


def test_torch_says_it_so() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert not is_damage(raised.value)


@pytest.mark.parametrize(
    "error", [ValueError("odd"), SyntaxError("broken PNG"), OSError("truncated"), RecordError("x")]
)
def test_damage(error: Exception) -> None:
    assert is_damage(error)


def test_a_batch_for_the_gpu_is_no_other(tmp_path: Path, write_images: WriteImages, monkeypatch: Any) -> None:
    pytest.importorskip("simplejpeg", reason="the size of a JPEG is read by simplejpeg")
    images = EncodedImages(TrainingImages(_folders(tmp_path, write_images), image_size=8))
    monkeypatch.setattr(os, "pread", _stopping(100))
    with pytest.raises(StorageError, match="of a file of"):
        images.__getitems__([0, 1])
