"""Read checkpoints of every known layout, whole and in one process.

Reading runs no code from a checkpoint's pickles, unless the caller trusts them.
"""

from __future__ import annotations

import importlib.util
import io
import json
import math
import pickle
import pickletools
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem, load, metadata  # type: ignore[attr-defined]
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from typing_extensions import override

from azureml_strategy.checkpoint.allowed_types import PLAIN
from azureml_strategy.checkpoint.encoding import is_plain
from azureml_strategy.files import name_within

# DeepSpeed's files hold objects of these modules: its loss scaler, its enums, learning rates that numpy computed. The
# weights do not need them.
_INERT_MODULES = ("deepspeed.", "numpy.")
_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
# The classes and functions in the index of torch's distributed checkpoints.
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
# The largest index, in bytes, that is searched before it is read, which takes about 1 s.
_LONGEST_SEARCHED = 4 << 20
# The opcodes of pickle that name a place in the unpickler's memo.
_MEMO_CODES = ("PUT", "BINPUT", "LONG_BINPUT")
# The file that Lightning writes beside the shards.
_REST = "meta.pt"
# The names that FSDPStrategy and ModelParallelStrategy give to the weights.
_ROOTS = ("model", "state_dict")
AVERAGED = "averaged.ckpt"
"""The file with the averages of all ranks in a folder of AzureMLLocalSGDStrategy's: an ordinary one of Lightning's."""
# PipelineStrategy writes the layout file beside the folder with DeepSpeed's files.
_LAYOUT, _SHARDS = "pipeline.json", "checkpoint"
_safe_list = threading.Lock()


class CheckpointFormatError(ValueError):
    """A checkpoint that cannot be read; the message says what was found and what to give instead."""


@dataclass(frozen=True)
class CheckpointFormat:
    """A layout of checkpoints on disk. `found` tells from file names alone whether a path has it; at most one may."""

    name: str
    found: Callable[[Path], bool]
    reader: Callable[[Path, bool], dict[str, Any]]

    def read(self, path: Path, trust_pickles: bool = False) -> dict[str, Any]:
        """Read a whole checkpoint into the form of Lightning's single file.

        Its `state_dict` holds full CPU tensors under the names of the unsharded module. With `trust_pickles`, reading
        runs whatever code the files ask for.

        Raises:
            CheckpointFormatError: something is missing, or reading would run code.
        """
        try:
            return self.reader(path, trust_pickles)
        except (CheckpointFormatError, MemoryError):
            raise
        except Exception as error:  # a damaged file may raise anything
            if isinstance(error, OSError) and error.filename is not None:  # torch's reader of archives names none
                raise
            raise CheckpointFormatError(
                f"{path} is {self.name}, and cannot be read: {type(error).__name__}: {' '.join(str(error).split())}. "
                "Use an earlier checkpoint, or copy this one again."
            ) from error


def read_file(file: Path, trust_pickles: bool) -> Any:
    """Load a file that `torch.save` wrote. Tensors stay on disk until they are used.

    A file with compressed parts is refused: torch writes none, and they may be a thousand times as large in memory.

    Raises:
        CheckpointFormatError: the file asks for more than values and tensors.
    """
    packed = None
    # Other errors are left to torch: the file may be of torch before 1.6, or damaged.
    with suppress(zipfile.BadZipFile, NotImplementedError, ValueError, OSError), zipfile.ZipFile(file) as archive:
        packed = next((each for each in archive.infolist() if each.file_size != each.compress_size), None)
    if packed is not None:
        raise CheckpointFormatError(f"{file} has a compressed part, {packed.filename!r:.100}, and torch writes none.")
    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=not trust_pickles)
    except pickle.UnpicklingError as error:
        raise CheckpointFormatError(_refusal(file, _unsafe(file))) from error


class DeepSpeedReader:
    """Reads files that DeepSpeed wrote, itself or by DeepSpeed's tool, without running code that they bring along.

    Objects of DeepSpeed's and numpy's classes become empty objects, and none of the classes' code runs. Other threads
    that load files at the same time are not affected. With `trust_pickles`, the files run whatever code they ask for.

    Raises:
        CheckpointFormatError: a file asks for something else.
    """

    def __init__(self, files: Iterable[Path], trust_pickles: bool) -> None:
        self._trust_pickles = trust_pickles
        wanted = {} if trust_pickles else {file: _unsafe(file) for file in files}
        for file, names in wanted.items():
            if not all(name.startswith(_INERT_MODULES) for name in names):
                raise CheckpointFormatError(_refusal(file, names))
        self._harmless: list[Any] = [
            (int if name == _STAGE else _Inert, name) for names in wanted.values() for name in names
        ]

    def load(self, file: Any, **arguments: Any) -> Any:
        """Load a file as `torch.load` does, but with our own `weights_only` in place of the caller's."""
        if self._trust_pickles:
            return torch.load(file, **{**arguments, "weights_only": False})
        # torch has one list of safe classes for all threads. While a pickle is read, entries are added to it, and two
        # readers at once would remove one another's entries.
        with _safe_list, torch.serialization.safe_globals(self._harmless):
            try:
                return torch.load(file, **{**arguments, "weights_only": True})
            except pickle.UnpicklingError as error:
                raise CheckpointFormatError(_refusal(Path(str(file)), [])) from error

    def weights(self, path: Path) -> dict[str, Tensor]:
        """Join the float32 weights of a checkpoint of ZeRO, by DeepSpeed's own tool.

        The tool loads with `weights_only=False`. So this runs a copy of the tool's module in which `load` replaces
        `torch.load`. The folder has a file `latest`.
        """
        spec = importlib.util.find_spec("deepspeed.utils.zero_to_fp32")
        assert spec is not None
        assert spec.loader is not None
        tool: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tool)
        tool.torch = ModuleType("torch")
        vars(tool.torch).update(vars(torch), load=self.load)
        joined: dict[str, Tensor] = tool.get_fp32_state_dict_from_zero_checkpoint(str(path))
        return joined


class _Inert:
    """Stands for an object whose content is not needed."""

    def __init__(self, *arguments: Any) -> None: ...
    def __setstate__(self, state: Any) -> None: ...


class IndexReader(filesystem.FileSystemReader):
    """Torch's reader of sharded checkpoints, whose pickled index can make only an index, unless it is trusted."""

    def __init__(self, path: Path, trust_pickles: bool) -> None:
        super().__init__(path)
        self._trust_pickles = trust_pickles

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        if self._trust_pickles:
            return super().read_metadata(*args, **kwargs)
        return read_index(Path(self.path))


def read_index(folder: Path) -> metadata.Metadata:
    """Read the index of a sharded checkpoint. Nothing but an index can be made of it.

    Raises:
        CheckpointFormatError: it is damaged, or asks for something that an index does not hold.
    """
    file = folder / ".metadata"
    try:
        content = file.read_bytes()
        # A damaged pickle may name a place in the unpickler's memo far beyond its own length, and the unpickler would
        # allocate room up to it. A large index is not searched, because that takes longer than reading it.
        if len(content) <= _LONGEST_SEARCHED:
            places = [argument for code, argument, _ in pickletools.genops(content) if code.name in _MEMO_CODES]
            if max((int(each or 0) for each in places), default=0) > len(content):
                raise ValueError("a place in memory that the file has no objects for")
        index: metadata.Metadata = _IndexUnpickler(io.BytesIO(content), file).load()
        _check_index(folder, index)
    except (CheckpointFormatError, OSError):
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointFormatError(
            f"{file} is damaged: {type(error).__name__}: {error}. Use an earlier checkpoint, or copy this one again."
        ) from error
    index.storage_meta = None  # when and by whom the checkpoint was written, which nobody needs
    return index


def _check_index(folder: Path, index: Any) -> None:
    """Refuse an index with parts of other types, tensors larger than their parts, or files outside the folder."""
    if type(index) is not metadata.Metadata:
        raise TypeError(f"it holds a {type(index).__name__}, and no index")
    for name, entry in index.state_dict_metadata.items():
        kinds = (metadata.TensorStorageMetadata, metadata.BytesStorageMetadata)
        if type(name) is not str or type(entry) not in kinds:
            raise TypeError(f"{name!r:.100} is a {type(entry).__name__}")
        if type(entry) is metadata.TensorStorageMetadata:
            if type(entry.properties.dtype) is not torch.dtype or type(entry.size) is not torch.Size:
                raise TypeError("a tensor without a type or a size")
            # a reader allocates the tensor before it reads the parts
            if sum(math.prod(each.sizes) for each in entry.chunks) < math.prod(entry.size):
                raise ValueError(f"a tensor of {tuple(entry.size)} has parts of fewer numbers")
    for place, stored in (index.storage_data or {}).items():
        if type(place) is not metadata.MetadataIndex or type(stored) is not filesystem._StorageInfo:
            raise TypeError("it does not say where its parts are")
        name_within(folder, stored.relative_path)


class _IndexUnpickler(pickle.Unpickler):
    def __init__(self, stream: IO[bytes], file: Path) -> None:
        super().__init__(stream)
        self._file = file

    @override
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):  # the latter on Python 3.13
            return _Inert  # where the checkpoint was written
        if (module, name) not in _INDEX:
            raise CheckpointFormatError(_refusal(self._file, [f"{module}.{name}"]))
        return _INDEX[module, name]


def _unsafe(file: Path) -> list[str]:
    """The names that a file asks for and torch refuses."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except (ValueError, RuntimeError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointFormatError(f"{file} is no file that torch.save has written: {reason}") from error


def _refusal(file: Path, names: list[str]) -> str:
    what = ", ".join(names) or "what torch's weights-only unpickler refuses"
    return (
        f"{file} asks for {what}. Reading it would run code that whoever wrote it has chosen, so it is not read. If "
        "you trust them, type --trust-pickles (in Python: trust_pickles=True; to resume: trainer.fit(..., "
        "weights_only=False))."
    )


def _read_single_file(path: Path, trust_pickles: bool) -> dict[str, Any]:
    checkpoint: dict[str, Any] = read_file(path, trust_pickles)
    if "state_dict" not in checkpoint:
        raise CheckpointFormatError(
            f"{path} holds no `state_dict`, so Lightning did not save it as a checkpoint. A file inside a sharded "
            "checkpoint is one part of it: give the whole folder."
        )
    return checkpoint


SINGLE_FILE = CheckpointFormat("a single Lightning file", Path.is_file, _read_single_file)


class _ValuesPlanner(DefaultLoadPlanner):
    """Loads entries that are no tensors, such as a module's extra state, without running code that they bring along."""

    def __init__(self, trust_pickles: bool, nested: bool = False) -> None:
        super().__init__(flatten_state_dict=nested, flatten_sharded_tensors=nested)
        self._trust_pickles = trust_pickles

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        if self._trust_pickles:
            loaded = torch.load(value, map_location="cpu", weights_only=False)
        else:
            with _safe_list, _numbers_of_numpy():
                loaded = torch.load(value, map_location="cpu", weights_only=True)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def _numbers_of_numpy() -> AbstractContextManager[Any]:
    """A context in which torch loads numpy's numbers, such as a learning rate that a lambda computed."""
    kinds = [type(np.dtype(kind)) for kind in np.typecodes["AllInteger"] + np.typecodes["Float"] + "?"]
    needed: list[Any] = [np.float64(0).__reduce__()[0], np.dtype, *dict.fromkeys(kinds)]
    known = torch.serialization.get_safe_globals()  # classes that the user has registered stay registered
    return torch.serialization.safe_globals([each for each in needed if each not in known])


def find_unloadable(state: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Find the values of a state that `load_sharded` will refuse: yield the keys that lead to each, and the value."""
    if isinstance(state, dict) or type(state) in (list, tuple):
        for key, each in state.items() if isinstance(state, dict) else enumerate(state):
            yield from find_unloadable(each, (*place, str(key)))
    elif type(state) not in PLAIN and not isinstance(state, (Tensor, np.generic)):
        with _safe_list, _numbers_of_numpy():
            if not is_plain(state):
                yield place, state


def load_sharded(state: dict[str, Any], path: Path) -> None:
    """Load a sharded checkpoint into nested dictionaries, in place, as `torch.distributed.checkpoint.load` does.

    This is a collective. Neither the index nor an entry that is no tensor can run code.

    Raises:
        CheckpointFormatError: a part is missing, does not fit, or would run code.
    """
    _load(path, state, storage_reader=IndexReader(path, False), planner=_ValuesPlanner(False, nested=True))


def _load(path: Path, state: dict[str, Any], **arguments: Any) -> None:
    try:
        load(state, **arguments)
    except CheckpointException as error:
        reason = str(next(iter(error.failures.values()))[0])  # the error holds those of all ranks, with their stacks
        if "Weights only load failed" in reason:  # the reason stands between advice that does not apply here
            reason = reason.partition("\n\nCheck the documentation")[0].splitlines()[-1].strip()
        raise _unread(path, reason) from error


def _read_distributed(path: Path, trust_pickles: bool) -> dict[str, Any]:
    reader = IndexReader(path, trust_pickles)
    index = reader.read_metadata()
    root = _root_of_weights(path, index)
    size = sum(each.stat().st_size for each in path.iterdir() if each.is_file())
    wanted = {name: entry for name, entry in index.state_dict_metadata.items() if name.startswith(f"{root}.")}
    tensors = {name: entry for name, entry in wanted.items() if isinstance(entry, metadata.TensorStorageMetadata)}
    for name, entry in tensors.items():
        if math.prod(entry.size) * entry.properties.dtype.itemsize > size:
            raise _unread(path, f"{name} is larger than all files of the folder")
    empty = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in tensors.items()}
    weights = {name: empty.get(name) for name in wanted}
    # This process reads alone, even if it belongs to a process group. Without one, older torch does so by itself.
    alone = {"no_dist": True} if dist.is_available() and dist.is_initialized() else {}
    # It loads only what `weights` names. The optimizer's two thirds stay on disk.
    _load(path, weights, storage_reader=reader, planner=_ValuesPlanner(trust_pickles), **alone)
    # torch writes each member of an extra state as an entry of its own.
    places = {name: (index.planner_data or {}).get(name, tuple(name.split(".", 1))) for name in weights}
    return {**_beside(path, trust_pickles), "state_dict": unflatten_state_dict(weights, places)[root]}


def _root_of_weights(path: Path, index: metadata.Metadata) -> str:
    """The name under which an index has the weights."""
    found = sorted({name.partition(".")[0] for name in index.state_dict_metadata})
    roots = sorted({name.partition(".")[0] for name in index.state_dict_metadata if "." in name} & set(_ROOTS))
    if len(roots) != 1:
        what = "weights under both of" if roots else f"{', '.join(found) or 'nothing'}, and no weights under"
        raise CheckpointFormatError(
            f"{path} holds {what} `{'` and `'.join(_ROOTS)}`, which is how Lightning names them. Save them under one: "
            'torch.distributed.checkpoint.save({"state_dict": module.state_dict()}, checkpoint_id=...).'
        )
    others = [name for name in found if name not in roots and not name.startswith("opt")]
    if others:
        warnings.warn(
            f"{path} holds {', '.join(others)} beside `{roots[0]}`, which are left out. If they are weights of the "
            'module, save all under one name: {"state_dict": module.state_dict()}.',
            stacklevel=3,
        )
    return roots[0]


def _beside(path: Path, trust_pickles: bool) -> Any:
    """What Lightning has written beside the shards."""
    file = path / _REST
    if not file.is_file():
        warnings.warn(
            f"{path} has no {_REST}, in which Lightning keeps all but weights and optimizers: hyperparameters and what "
            "hooks have added are left out. If the Trainer wrote it, was it copied whole?",
            stacklevel=2,
        )
        return {}
    return read_file(file, trust_pickles)


def _unread(path: Path, reason: str) -> CheckpointFormatError:
    return CheckpointFormatError(f"{path}: a part cannot be read, and no part may be left out: {reason}")


DISTRIBUTED = CheckpointFormat(
    "torch.distributed.checkpoint shards", lambda path: (path / ".metadata").is_file(), _read_distributed
)


def consolidate_pipeline(folder: Path, trust_pickles: bool = False) -> dict[str, Tensor]:
    """Read the weights of all pipeline stages, under their names in the whole module.

    They are on the CPU and in the dtype of training. Tied parameters appear under each of their names.

    Raises:
        CheckpointFormatError: the file of a layer is missing, or reading it would run code.
    """
    weights: dict[str, Tensor] = {}
    for index, place in enumerate(json.loads((folder / _LAYOUT).read_text())["places"]):
        if place is None:
            continue
        file = folder / _SHARDS / f"layer_{index:02d}-model_states.pt"
        if not file.is_file():
            raise CheckpointFormatError(
                f"{folder} lacks {file.relative_to(folder)}: was it copied from one node of several, or while it was "
                "being written? Give a folder that all nodes wrote to."
            )
        weights |= {f"{place}.{name}": value for name, value in read_file(file, trust_pickles).items()}
    return weights


def _read_pipeline(path: Path, trust_pickles: bool) -> dict[str, Any]:
    # This file holds Lightning's own entries, the same on all ranks.
    first = path / _SHARDS / "mp_rank_00_model_states.pt"
    if not first.is_file():
        raise _unread(path, f"there is no {first.relative_to(path)}")
    saved = DeepSpeedReader([first], trust_pickles).load(first, map_location="cpu", mmap=True)
    return {**saved, "state_dict": consolidate_pipeline(path, trust_pickles)}


PIPELINE = CheckpointFormat("DeepSpeed pipeline stages", lambda path: (path / _LAYOUT).is_file(), _read_pipeline)


def _is_zero(path: Path) -> bool:
    # A pipeline with ZeRO inside writes optimizer shards too, but its weights are in one file for each layer.
    shards, layers = _zero_files(path, "*zero_pp_rank_*_optim_states.pt"), _zero_files(path, "layer_*-model_states.pt")
    return bool(shards) and not layers


def _read_zero(path: Path, trust_pickles: bool) -> dict[str, Any]:
    if _zero_files(path, "*mp_rank_01_model_states.pt"):
        raise CheckpointFormatError(
            f"{path} was saved with tensor_parallel_size above 1: each file holds a slice of each matrix, and "
            "DeepSpeed joins only what ZeRO cut. It resumes with the same tensor_parallel_size. For one file of "
            "weights, train with tensor_parallel_size=1 (stage 3 cuts parameters too) or with azureml_model_parallel, "
            "whose checkpoints are consolidated whatever their tensor_parallel_size."
        )
    models = _zero_files(path, "*_model_states.pt")
    if not models:
        raise _unread(path, "there is no file of its model's states, *_model_states.pt")
    reader = DeepSpeedReader(_zero_files(path, "*.pt"), trust_pickles)
    # The first file holds Lightning's own entries, the same on all ranks. Its pickled tensors stay on disk.
    saved = reader.load(models[0], map_location="cpu", mmap=True)
    try:
        weights = reader.weights(path)
    except (ValueError, FileNotFoundError) as error:  # DeepSpeed's tool counts the files of the ranks
        raise _unread(path, str(error)) from error
    # The tool joins parameters and buffers only.
    extra = {name: value for name, value in saved["module"].items() if name.rpartition(".")[2] == "_extra_state"}
    return {**saved, "state_dict": {**weights, **extra}}


def _zero_files(path: Path, pattern: str) -> list[Path]:
    """The matching files in the folder that `latest` names; none if there is no `latest`."""
    latest = path / "latest"
    if not latest.is_file():
        return []
    try:
        return sorted(name_within(path, latest.read_text().strip()).glob(pattern))
    except ValueError as error:
        raise CheckpointFormatError(
            f"{latest} names no folder beside it: {error}. Copy the checkpoint again."
        ) from error


ZERO = CheckpointFormat("DeepSpeed ZeRO shards", _is_zero, _read_zero)
LOCAL_SGD = CheckpointFormat(
    "local SGD's averages and what each rank has of its own",
    lambda path: (path / AVERAGED).is_file(),
    lambda path, trust_pickles: _read_single_file(path / AVERAGED, trust_pickles),
)
FORMATS: tuple[CheckpointFormat, ...] = (ZERO, PIPELINE, DISTRIBUTED, LOCAL_SGD, SINGLE_FILE)
