"""Reading files of checkpoints without running what they hold.

A pickle can name any function, and have it called while it is read. So files are read as a training reads them, with
torch's weights-only unpickler, unless the caller trusts whoever wrote them.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from typing_extensions import override

from azureml_strategy.checkpoint.formats.format import CheckpointFormatError

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
# Of DeepSpeed's files: its loss scaler, its enums, learning rates that numpy computed. No weights are made of these.
_INERT_MODULES = ("deepspeed.", "numpy.")
_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
# What the index of torch's distributed checkpoints consists of.
_INDEX: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__name__): kind
    for kind in (
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
        torch.serialization._get_layout,
    )
}


def read_file(file: Path, trust_pickles: bool) -> Any:
    """What `torch.save` has written; tensors stay on disk until they are used.

    Args:
        file: of a checkpoint.
        trust_pickles: run whatever it asks for.

    Raises:
        CheckpointFormatError: it asks for more than values and tensors.
    """
    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=not trust_pickles)
    except pickle.UnpicklingError as error:
        raise CheckpointFormatError(_refusal(file, _unsafe(file))) from error


@contextmanager
def reading_deepspeed(files: Iterable[Path], trust_pickles: bool) -> Iterator[None]:
    """Inside, `torch.load` runs no code for these files, whoever calls it: DeepSpeed's tools would have it do so.

    Objects of DeepSpeed's and numpy's classes become empty ones, and none of the classes' code runs.

    Args:
        files: that DeepSpeed has written.
        trust_pickles: run whatever they ask for, and change nothing.

    Raises:
        CheckpointFormatError: one of them asks for something else.
    """
    if trust_pickles:
        yield
        return
    wanted = {file: _unsafe(file) for file in files}
    for file, names in wanted.items():
        if not all(name.startswith(_INERT_MODULES) for name in names):
            raise CheckpointFormatError(_refusal(file, names))
    harmless: list[Any] = [(int if name == _STAGE else _Inert, name) for names in wanted.values() for name in names]
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals(harmless):
            yield
    except pickle.UnpicklingError as error:
        raise CheckpointFormatError(_refusal(next(iter(wanted)).parent, [])) from error
    finally:
        os.environ.pop(_FORCE)
        if before is not None:
            os.environ[_FORCE] = before


class _Inert:
    """In the place of an object that nobody needs."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class IndexReader(FileSystemReader):
    """Torch's reader of sharded checkpoints, whose index is a pickle: nothing else than an index is made of it.

    Args:
        path: the folder.
        trust_pickles: run whatever the index asks for.
    """

    def __init__(self, path: Path, trust_pickles: bool) -> None:
        super().__init__(path)
        self._trust_pickles = trust_pickles

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._trust_pickles:
            return super().read_metadata(*args, **kwargs)
        file = Path(self._get_metadata_path(kwargs.get("rank")))
        with file.open("rb") as stream:
            index: Metadata = _IndexUnpickler(stream, file).load()
        index.storage_meta = None  # when and by whom it was written
        return index


class _IndexUnpickler(pickle.Unpickler):
    def __init__(self, stream: IO[bytes], file: Path) -> None:
        super().__init__(stream)
        self._file = file

    @override
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "pathlib" and name.endswith("Path"):
            return _Inert  # where it was written
        if (module, name) not in _INDEX:
            raise CheckpointFormatError(_refusal(self._file, [f"{module}.{name}"]))
        return _INDEX[module, name]


def _unsafe(file: Path) -> list[str]:
    """The names of what a file asks for and torch refuses."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except (ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointFormatError(f"{file} is no file that torch.save has written: {error}") from error


def _refusal(file: Path, names: list[str]) -> str:
    what = ", ".join(names) or "what torch's weights-only unpickler refuses"
    return (
        f"{file} asks for {what}. Reading it would run code that whoever wrote it has chosen, so it is not read. If "
        "you trust them, type --trust-pickles (in Python: trust_pickles=True)."
    )
