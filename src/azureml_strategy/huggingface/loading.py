"""Loads a pretrained model in the way that the running strategy needs: no process holds or reads more than its part."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from azureml_strategy.control.gather import on_rank_zero
from azureml_strategy.control.store import StepError
from azureml_strategy.files import read_range
from azureml_strategy.huggingface import transformers_internals as internals
from azureml_strategy.huggingface.sources import SHOWN, PretrainedModelError, Source, find_source
from azureml_strategy.huggingface.transformers_internals import torch_type
from azureml_strategy.huggingface.zero_loading import load_under_zero_3

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Index = slice | EllipsisType
Way = Literal["whole", "broadcast", "in_parts", "zero_3"]
_SOURCE, _SKETCH = "pretrained_source", "_pretrained_sketch"
# The precisions of a Trainer with weights of another type than float32.
_TYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


class FileSlice:
    """A tensor of a file, with the methods of safetensors' own slices that transformers calls.

    Args:
        file: descriptor of the open file.
        path: of the file, for messages.
        offset: where the tensor begins in it, in bytes.
        dtype: safetensors' name of its type, such as `BF16`.
        shape: of the whole tensor.
    """

    def __init__(self, file: int, path: Path, offset: int, dtype: str, shape: list[int]) -> None:
        self._file, self._path, self._offset, self._dtype, self._shape = file, path, offset, dtype, shape

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return self._shape

    def get_dtype(self) -> str:
        """Return safetensors' name of its type."""
        return self._dtype

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Tensor:
        """Read a part. Of the file it reads whole rows, and only those that the part has."""
        indices = index if isinstance(index, tuple) else (index,)
        if not self._shape:
            return self._read(0, 1).view(())
        rows = slice(None) if indices[0] is Ellipsis else indices[0]
        start, stop, _ = rows.indices(self._shape[0])
        part = self._read(start, max(stop, start)).view(-1, *self._shape[1:])
        inner = tuple(each for each in indices[1:] if each is not Ellipsis)
        return part[(slice(None), *inner)].contiguous() if inner else part

    def _read(self, start: int, stop: int) -> Tensor:
        dtype = torch_type(self._dtype)
        row = math.prod(self._shape[1:]) * dtype.itemsize
        size, place = (stop - start) * row, self._offset + start * row
        self._require(place + size - os.fstat(self._file).st_size, size, place)  # before memory is taken for it
        content = torch.empty(size, dtype=torch.uint8)
        view, done = content.numpy().data, 0
        while done < len(view):
            got = os.preadv(self._file, [view[done:]], place + done)
            if not got:  # the file was cut off since its size was read
                self._require(len(view) - done, size, place)
            done += got
        return content.view(dtype)

    def _require(self, missing: int, size: int, place: int) -> None:
        if missing > 0:
            raise OSError(
                f"The file ends {missing} bytes before its tensor does: {self._path}, of which {size:,} bytes from "
                f"byte {place:,} on were asked for. Copy it again."
            )


@contextmanager
def open_slices(files: list[Path]) -> Iterator[dict[str, FileSlice]]:
    """Open safetensors files, and return their tensors by name; they can be read until the context ends.

    The format is a length of 8 bytes, that many bytes of JSON, and the tensors
    (https://huggingface.co/docs/safetensors/index#format).
    """
    opened = [os.open(file, os.O_RDONLY) for file in files]
    try:
        yield {name: each for file, path in zip(opened, files, strict=True) for name, each in _tensors(file, path)}
    finally:
        for file in opened:
            os.close(file)


def _tensors(file: int, path: Path) -> Iterator[tuple[str, FileSlice]]:
    length = int.from_bytes(read_range(file, 8, 0), "little")
    text = read_range(file, min(length, os.fstat(file).st_size), 8)
    if len(text) < length:
        raise OSError(f"{path} ends within its header, which has {length:,} bytes from byte 8 on. Copy it again.")
    try:
        header: dict[str, Any] = json.loads(text)
        for name, facts in header.items():
            if name == "__metadata__":
                continue
            start, stop = facts["data_offsets"]
            if not all(type(each) is int and each >= 0 for each in (start, stop, *facts["shape"])):
                raise ValueError("places and sizes are whole numbers from 0")
            if math.prod(facts["shape"]) * torch_type(facts["dtype"]).itemsize != stop - start:
                raise ValueError(f"a tensor {facts['shape']} does not take the bytes from {start} to {stop}")
            yield name, FileSlice(file, path, 8 + length + start, facts["dtype"], facts["shape"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise OSError(f"{path} has a damaged header: {error!r:.200}. Copy it again.") from error


@dataclass(frozen=True)
class Loading:
    """How the running strategy gives a model its weights.

    Attributes:
        way: `whole`: each rank reads all weights. `broadcast`: rank 0 reads them for all. `in_parts`: each rank reads
            its parts later, when the parameters are cut (`fill`). `zero_3`: see `load_under_zero_3`.
        device: of this rank.
        precision: as in `Trainer(precision=...)`.
    """

    way: Way
    device: torch.device
    precision: str


@dataclass
class _Sketch:
    """A model whose weights are still in files.

    Attributes:
        dtype: of the weights in memory.
        places: module and attribute of each tensor that the files have, by its name in the model. The modules are the
            same after `peft` has wrapped them, or a strategy has cut their parameters.
    """

    dtype: torch.dtype
    places: dict[str, tuple[nn.Module, str]]


class _KeepsValues(TorchFunctionMode):
    """Keeps the values of tensors that are moved to the meta device.

    `peft` moves new adapters to the device of their base. If the base has no values yet, the adapters would lose
    theirs.
    """

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to and not args[0].is_meta:
            asked = (*args[1:], *kwargs.values())
            if any(isinstance(each, (str, torch.device)) and torch.device(each).type == "meta" for each in asked):
                kinds = [each for each in asked if isinstance(each, torch.dtype)]
                return func(args[0], kinds[0]) if kinds else args[0]
        return func(*args, **kwargs)


_running: ContextVar[Loading | None] = ContextVar("loading", default=None)


@contextmanager
def loading_as(loading: Loading) -> Iterator[None]:
    """Make `load_pretrained` load in a strategy's way, while the strategy calls `configure_model`."""
    token = _running.set(loading)
    try:
        with _KeepsValues() if loading.way == "in_parts" else nullcontext():
            yield
    finally:
        _running.reset(token)


def load_pretrained(
    source: str | os.PathLike[str],
    model_class: Any = None,
    *,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a pretrained model, so that no process holds more of it than the strategy needs.

    Call it in `configure_model`, where the strategy is known. Anywhere else each process reads the whole model.

    Args:
        source: a folder that `save_pretrained` wrote, an id of the Hugging Face hub, or `azureml:NAME:VERSION`, a model
            registered in the job's workspace.
        model_class: a class of transformers, or one of its Auto classes; `AutoModelForCausalLM` if None.
        dtype: of the weights in memory. By default float32, also for files in bfloat16, as an optimizer loses small
            updates of 16-bit weights; the type of the precision with `bf16-true`, `16-true` and `64-true`.
        revision: branch, tag or commit on the hub.
        kwargs: changes of the model's configuration, as `num_labels=3` or `attn_implementation="sdpa"`.

    Returns:
        The model, in training mode. Under FSDP2, tensor parallelism and a pipeline its weights have no values before
        training starts: they can be wrapped by `peft`, frozen and tied, but not read.

    Raises:
        PretrainedModelError: the files are missing, incomplete, of another format, or do not fit the class.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    found = find_source(source, revision)
    files = found.weight_files()
    config = _configuration(AutoConfig, found, kwargs)
    loading = _running.get() or Loading("whole", torch.device("cpu"), "32-true")
    dtype = dtype or _TYPES.get(loading.precision, torch.float32)
    cls = internals.class_for(model_class or AutoModelForCausalLM, config)
    with internals.float32_by_default():
        if loading.way == "zero_3":
            model = load_under_zero_3(cls, config, files, dtype)
        else:
            model = _sketched(cls, config, files, dtype, found)
    setattr(model, _SOURCE, found)
    model.name_or_path = model.config.name_or_path = found.name
    if (found.folder / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(found.folder)
    if loading.way == "whole":
        fill(model, model, loading.device)
    elif loading.way == "broadcast":
        _receive(model, loading.device)
    model.train()
    return model


def source_of(model: nn.Module) -> Source | None:
    """Return where a model's weights come from; None if `load_pretrained` did not make it."""
    return getattr(model, _SOURCE, None)


def is_sketch(model: nn.Module) -> bool:
    """Whether a model's weights are still in files."""
    return hasattr(model, _SKETCH)


def fill(model: PreTrainedModel, module: nn.Module, device: torch.device) -> None:
    """Read the weights of a sketch that `module` still holds, each rank its parts.

    Call it when the parameters are cut, and before an optimizer or anything else refers to them.

    Args:
        model: what `load_pretrained` returned.
        module: holds the model, or those of its layers that this rank computes.
        device: where the weights go.
    """
    sketch: _Sketch = getattr(model, _SKETCH)
    kept = set(module.modules())
    places = {name: place for name, place in sketch.places.items() if place[0] in kept}
    needed = {id(_tensor(*place)) for place in places.values()}
    # Files have a tied weight under one of its names, which may be that of a layer on another stage.
    tensors = {name: _tensor(*place) for name, place in sketch.places.items()}
    wanted = {name: tensor for name, tensor in tensors.items() if id(tensor) in needed}
    source = source_of(model)
    assert source is not None
    with open_slices(source.weight_files()) as slices:
        read = internals.read_parts(type(model), model.config, wanted, slices, sketch.dtype, device)
    values: dict[int, Tensor] = {}
    for name, tensor in read.items():
        values.setdefault(id(wanted[name]), tensor)
    for owner, attribute in places.values():
        _replace(owner, attribute, values)
    delattr(model, _SKETCH)


def fill_all(module: nn.Module, device: torch.device) -> None:
    """Read the weights of all sketches in a module, see `fill`."""
    for model in internals.find_models(module).values():
        if is_sketch(model):
            fill(model, module, device)


def refuse_lost_values(module: nn.Module) -> None:
    """Refuse parameters that have no values, and that no file has.

    Raises:
        PretrainedModelError: there are some; the message names them.
    """
    sketches = [each for each in internals.find_models(module).values() if is_sketch(each)]
    known = {id(_tensor(*place)) for model in sketches for place in getattr(model, _SKETCH).places.values()}
    lost = [name for name, tensor in module.named_parameters() if tensor.is_meta and id(tensor) not in known]
    if sketches and lost:
        raise PretrainedModelError(
            f"{', '.join(lost[:SHOWN])} ({len(lost)} parameters) have no values: they were made or changed from "
            "weights that are still in files. Do that before: save the changed model with save_pretrained() in one "
            "process, and load that folder; or use strategy='azureml_ddp', which reads the weights at once."
        )


def _configuration(auto: Any, source: Source, changes: dict[str, Any]) -> Any:
    config, unused = auto.from_pretrained(source.folder, return_unused_kwargs=True, **changes)
    if unused:
        raise PretrainedModelError(
            f"load_pretrained has no argument {', '.join(unused)}, nor has the configuration of {source.name} "
            f"({type(config).__name__}). Leave it out, or check how it is spelt."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise PretrainedModelError(
            f"{source.name} is quantized, and quantized weights cannot be trained or cut here. Load the model that it "
            "was made from."
        )
    return config


def _sketched(cls: Any, config: Any, files: list[Path], dtype: torch.dtype, source: Source) -> PreTrainedModel:
    model: PreTrainedModel
    model, in_files, mismatched, unset = internals.sketch(cls, config, files, dtype)
    if mismatched:
        name, found, wanted = mismatched[0]
        raise PretrainedModelError(
            f"{name} is {tuple(found)} in {source.name}, but {tuple(wanted)} in this {cls.__name__} "
            f"({len(mismatched)} differ). Load it with the configuration that it was saved with."
        )
    if unset:
        raise PretrainedModelError(
            f"{', '.join(unset[:SHOWN])} ({len(unset)} tensors) would be random memory: {source.name} does not have "
            f"them, and {cls.__name__}._init_weights does not set them. Set them there, or save a model with them by "
            "save_pretrained() and load that folder."
        )
    owners = {name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in in_files}
    setattr(model, _SKETCH, _Sketch(dtype, owners))
    return model


def _receive(model: PreTrainedModel, device: torch.device) -> None:
    """Fill a sketch: rank 0 reads the weights, and broadcasts them to the others."""
    rank = dist.get_rank()
    if rank > 0:
        _make_room(model, device)
    try:  # not in a collective, which would time out before a slow disk has read a large model
        on_rank_zero("load_pretrained", rank, dist.get_world_size(), lambda: fill(model, model, device))
    except StepError as error:
        raise PretrainedModelError(f"Rank 0 could not read the weights of {source_of(model)}: {error}") from error
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        values = tensor.detach().to(device)
        dist.broadcast(values, src=0)
        tensor.detach().copy_(values)


def _make_room(model: PreTrainedModel, device: torch.device) -> None:
    """Allocate memory for a sketch's weights, without reading them."""
    places = getattr(model, _SKETCH).places.values()
    room: dict[int, Tensor] = {}
    for tensor in (_tensor(*place) for place in places):
        empty = torch.empty_like(tensor, device=device)
        new = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
        internals.mark_loaded(room.setdefault(id(tensor), new))
    for owner, attribute in places:
        _replace(owner, attribute, room)
    delattr(model, _SKETCH)


def _tensor(owner: nn.Module, attribute: str) -> Tensor:
    tensor: Tensor = getattr(owner, attribute)
    return tensor


def _replace(owner: nn.Module, attribute: str, values: Mapping[int, Tensor]) -> None:
    """Replace a tensor without values by one with values. Attributes that shared the tensor share the new one."""
    old = _tensor(owner, attribute)
    if old.is_meta:  # another name of the same attribute may have replaced it already
        setattr(owner, attribute, values[id(old)].requires_grad_(old.requires_grad))
