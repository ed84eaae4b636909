"""Every reader of files and requests, on mutations of real ones: a right result, or the reader's own error in one line.

Nothing else is raised, no code runs, and no more memory is taken than a bound. The mutations are the same in each run.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import re
import tarfile
import warnings
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.data.packed import packed_set
from tests.data.photographs import photograph
from tests.memory import peak_of
from tests.network.nccl_log.test_reader import FOUR_NODES
from tests.strategies.tuning.test_record import made
from torch.distributed.checkpoint import save

from azureml_strategy.checkpoint.encoding import encode
from azureml_strategy.checkpoint.formats import DISTRIBUTED, SINGLE_FILE, CheckpointFormatError
from azureml_strategy.checkpoint.manifest import Manifest, StoredFile
from azureml_strategy.checkpoint.serialization import MOVED, UnrestorableStateError, from_plain, to_plain
from azureml_strategy.data.node_cache.protocol import encode as message
from azureml_strategy.data.node_cache.protocol import receive_from
from azureml_strategy.data.packing.images import ImageForm
from azureml_strategy.data.packing.shards import UnreadableError
from azureml_strategy.data.shard_index import INDEX_NAME, ShardIndexError, load_index
from azureml_strategy.data.tar_index import index_tars
from azureml_strategy.huggingface.loading import open_slices
from azureml_strategy.network.nccl_log import read_transport
from azureml_strategy.serving.inputs import BadInputError, ExpectedInput, read_body, read_file
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.pipeline.checkpoint import PipelineLayout
from azureml_strategy.strategies.tuning.record import read_tuning, write_tuning
from azureml_strategy.strategies.tuning.search import Settings
from azureml_strategy.tracking.offline_queue import OfflineQueue
from azureml_strategy.tracking.run import RunRequest

MIB = 2**20
ran: list[str] = []


class Evil:
    """A pickle that calls what its writer has chosen."""

    def __reduce__(self) -> Any:
        return ran.append, ("code",)


@dataclass
class Reader:
    """A reader of one kind of files.

    Attributes:
        write: writes a real file into a folder, and returns its path.
        read: reads it.
        errors: what it may raise.
        rounds: how many mutations are read.
        memory: how many bytes they may take.
    """

    write: Callable[[Path], Path]
    read: Callable[[Path], object]
    errors: tuple[type[Exception], ...]
    rounds: int = 150
    memory: int = 96 * MIB


VALUES = {
    "a": Path("b"),
    "b": [partial(torch.optim.AdamW, lr=0.1), Namespace(c=np.arange(3))],
    "d": {1: {Path("x"), 2.5}, "e": np.float64(0.5), "f": frozenset({3})},
    "g": torch.relu,
    "h": (1 << 3000, range(3), re.compile("a+"), complex(1, 2)),
}


def _checkpoint(folder: Path) -> Path:
    content = {"state_dict": {"w": torch.ones(3)}, "epoch": 3, "hyper_parameters": {"width": 3, "root": Path("a")}}
    torch.save(to_plain({**content, "callbacks": {"mine": VALUES}}), folder / "one.ckpt")
    return folder / "one.ckpt"


def _evil_checkpoint(folder: Path) -> Path:
    torch.save({"state_dict": {"w": torch.ones(3)}, "mine": Evil()}, folder / "evil.ckpt")
    return folder / "evil.ckpt"


def _sharded(folder: Path) -> Path:
    save({"state_dict": {"w": torch.ones(3, 4), "b": torch.ones(3), "n": 5}}, checkpoint_id=folder)
    torch.save({"epoch": 1}, folder / "meta.pt")
    return folder / ".metadata"


def _evil_sharded(folder: Path) -> Path:
    file = _sharded(folder)
    index = pickle.loads(file.read_bytes())
    index.planner_data = Evil()
    file.write_bytes(pickle.dumps(index))
    return file


def _shard(folder: Path) -> Path:
    _sharded(folder)
    return next(folder.glob("*.distcp"))


def _manifest(folder: Path) -> Path:
    files = {"step=1.ckpt": StoredFile(3, 5)}
    Manifest("step=1.ckpt", 1, 0, 1.5, 1, "end", 0.5, "min", files).write(folder)
    return folder / "step=1.ckpt.manifest.json"


def _index(folder: Path) -> Path:
    packed_set(folder, samples=20)
    return folder / INDEX_NAME


def _tar(folder: Path) -> Path:
    image = _jpeg()
    with tarfile.open(folder / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for number, label in enumerate(("0", "1", "2")):
            for name, content in ((f"{'é' * 60}{number}.jpg", image), (f"{'é' * 60}{number}.cls", label.encode())):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return folder / "a.tar"


def _jpeg(**how: Any) -> bytes:
    file = io.BytesIO()
    photograph(24, 24).save(file, "JPEG", **how)
    return file.getvalue()


def _image(kind: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        how = {"progressive": True, "exif": b"Exif\0\0II*\0" + bytes(30)} if kind == "JPEG" else {}
        photograph(24, 24).save(folder / "image.png", kind, **how)
        return folder / "image.png"

    return write


def _json(folder: Path) -> Path:
    content = {"data": np.arange(24).reshape(2, 3, 2, 2).tolist()}
    (folder / "samples.json").write_text(json.dumps(content))
    return folder / "samples.json"


def _npy(folder: Path) -> Path:
    np.save(folder / "samples.npy", np.arange(24, dtype=np.uint8).reshape(2, 3, 2, 2))
    return folder / "samples.npy"


def _log(folder: Path) -> Path:
    (folder / "nccl.log").write_text(FOUR_NODES[:20_000])
    return folder / "nccl.log"


def _tuned(folder: Path) -> Path:
    settings = Settings(25, 1, True, False, None, 1)
    write_tuning(folder / "tuned.json", made(settings, settings, [0.1, 0.2]))
    return folder / "tuned.json"


def _spool(folder: Path) -> Path:
    spool = OfflineQueue.create(folder, RunRequest("http://host:5000", tags={"a": "b"}))
    spool.close()
    with spool.path.open("a") as file:
        for line in (
            {"metrics": "loss", "value": 0.5, "step": 3, "timestamp_ms": 1763800000000},
            {"params": "lr", "value": "0.1"},
            {"files": "network.json", "value": "{}"},
            {"end": "status", "value": "FINISHED", "timestamp_ms": 1763800000000},
        ):
            file.write(json.dumps(line) + "\n")
    return spool.path


def _read_spool(path: Path) -> None:
    spool = OfflineQueue(path)
    spool.request("http://host:5000")
    assert isinstance(spool.store, str)
    for batch, _ in spool.batches():
        assert batch.items or not batch.kind


def _weights(folder: Path) -> Path:
    save_file({"a": torch.ones(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}, folder / "model.safetensors")
    return folder / "model.safetensors"


def _read_weights(path: Path) -> None:
    with open_slices([path]) as found:
        for each in found.values():
            each[...]


def _message(folder: Path) -> Path:
    (folder / "message").write_bytes(encode_message() + bytes(16))
    return folder / "message"


def encode_message() -> bytes:
    return message({"ask": "read", "damaged": 0}, bytes(16))


def _read_message(path: Path) -> None:
    file: Any = io.BufferedReader(io.BytesIO(path.read_bytes()))  # type: ignore[arg-type]
    receive_from(file)


def _layout(folder: Path) -> Path:
    PipelineLayout((0, 2, 4), 1, 1, "32-true", ("a", None, "b", "c")).write(folder)
    return folder / "pipeline.json"


def _read_checkpoint(path: Path) -> None:
    from_plain(SINGLE_FILE.read(path))


IMAGE = ExpectedInput((3, None, None), torch.uint8, 4)
OWN = (CheckpointFormatError, UnrestorableStateError)
READERS: dict[str, Reader] = {
    "checkpoint": Reader(_checkpoint, _read_checkpoint, OWN),
    "checkpoint with code": Reader(_evil_checkpoint, _read_checkpoint, OWN, 40),
    "index of shards": Reader(_sharded, lambda path: DISTRIBUTED.read(path.parent), OWN),
    "index of shards with code": Reader(_evil_sharded, lambda path: DISTRIBUTED.read(path.parent), OWN, 40),
    "shard": Reader(_shard, lambda path: DISTRIBUTED.read(path.parent), OWN, 60),
    "manifest": Reader(_manifest, Manifest.read, (ValueError,)),
    "index of a set": Reader(_index, load_index, (ShardIndexError,)),
    "tar": Reader(_tar, lambda path: index_tars(path.parent), (ShardIndexError,)),
    "JPEG file": Reader(_image("JPEG"), lambda path: ImageForm(8).encode(path.read_bytes()), (UnreadableError,)),
    "PNG file": Reader(_image("PNG"), lambda path: ImageForm(8).encode(path.read_bytes()), (UnreadableError,)),
    # Pillow makes two canvases of as many pixels as it takes without a warning.
    "WEBP file": Reader(
        _image("WEBP"), lambda path: ImageForm(8).encode(path.read_bytes()), (UnreadableError,), memory=750 * MIB
    ),
    "BMP file": Reader(_image("BMP"), lambda path: ImageForm(8).encode(path.read_bytes()), (UnreadableError,)),
    "image to score": Reader(_image("PNG"), lambda path: read_file(path, IMAGE), (BadInputError,)),
    "request of JSON": Reader(_json, lambda path: IMAGE.checked(read_body(path.read_bytes())), (BadInputError,), 400),
    "request of numpy's": Reader(_npy, lambda path: read_file(path, IMAGE), (BadInputError,), 400),
    "log of NCCL": Reader(_log, lambda path: read_transport(path.read_bytes()), (), 40),
    "tuned settings": Reader(_tuned, read_tuning, (ConfigurationError,), 300),
    "unsent metrics": Reader(_spool, _read_spool, (ValueError,), 300),
    "safetensors": Reader(_weights, _read_weights, (OSError,), 300),
    "message of the cache": Reader(_message, _read_message, (EOFError, ConnectionError), 300),
    "layout of a pipeline": Reader(_layout, lambda path: PipelineLayout.read(path.parent), (ConfigurationError,), 300),
}
NUMBERS = (b"-1", b"0", b"1e999", b"99999999999999999999", b"2147483648", b"4294967296", b"NaN", b"null", b'"a"', b"[]")


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Change a file as a bad disk does, or as somebody who knows what readers forget."""
    made = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        at, length = chance.randrange(len(made) + 1), chance.choice((1, 4, 8, 100, 5000))
        way = chance.randrange(8)
        if way == 0 and at < len(made):
            made[at] ^= 1 << chance.randrange(8)
        elif way == 1:
            del made[at:]
        elif way == 2:
            del made[at : at + length]
        elif way == 3:
            start = chance.randrange(len(made) + 1)
            made[at:at] = made[start : start + length]
        elif way == 4:
            made[at : at + length] = bytes((chance.choice((0, 255, 127, 128)),)) * min(length, len(made) - at)
        elif way == 5:
            made[at:at] = chance.randbytes(length)
        elif found := list(re.finditer(rb"-?\d+(\.\d+)?|true|null|\"[^\"]{1,30}\"", bytes(made))):
            place = chance.choice(found)
            made[place.start() : place.end()] = chance.choice(NUMBERS)
    return bytes(made)


def _attempt(reader: Reader, path: Path) -> bool:
    """Read once; whether there was a result."""
    said = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader.read(path)
    except reader.errors as error:
        said = str(error)
    assert said is None or (said.strip() and "\n" not in said), "an error is one line"
    return said is None


@pytest.mark.parametrize("kind", READERS)
def test_no_mutation_gets_further_than_an_error(kind: str, tmp_path: Path) -> None:
    reader, chance = READERS[kind], random.Random(kind)
    path = reader.write(tmp_path)
    content = path.read_bytes()
    assert _attempt(reader, path) is ("code" not in kind)
    ran.clear()
    with peak_of(reader.memory):
        for _ in range(reader.rounds):
            path.write_bytes(mutated(content, chance))
            _attempt(reader, path)
    assert ran == []


def _nodes(value: Any) -> list[list[Any]]:
    """Every list in a plain form."""
    found = [value] if isinstance(value, list) else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [*found, *(node for each in inner for node in _nodes(each))]


WRONG: tuple[Any, ...] = (
    None,
    -1,
    2**70,
    "again",
    "object",
    "reference",
    ["plain", "eval"],
    [],
    {},
    1e999,
    "os.system",
)


def test_no_mutation_of_a_plain_form_gets_further_than_an_error() -> None:
    chance = random.Random(1)
    ran.clear()
    with peak_of(64 * MIB):
        for _ in range(1500):
            form = pickle.loads(pickle.dumps(encode({"mine": VALUES, "best": Namespace(score=1)})))
            for _ in range(chance.choice((1, 2, 4))):
                node = chance.choice(_nodes(form))
                others = pickle.loads(pickle.dumps(chance.choice(_nodes(form))))
                if node:
                    node[chance.randrange(len(node))] = chance.choice((*WRONG, others, *others))
            with suppress(UnrestorableStateError):
                from_plain({"callbacks": {}, MOVED: [{"at": ["plain", ["callbacks", "mine"]], "value": form}]})
    assert ran == []
