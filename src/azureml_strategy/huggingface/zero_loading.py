"""Loads a pretrained model under ZeRO-3: built in parts, then filled from safetensors files one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from azureml_strategy.control.gather import gather
from azureml_strategy.huggingface.transformers_internals import no_first_weights, torch_type

if TYPE_CHECKING:
    from safetensors import safe_open
    from transformers import PreTrainedConfig, PreTrainedModel

# What torch and transformers read of a tensor without needing its values.
_FACTS = {"shape", "dtype", "ndim", "size", "dim", "numel", "is_floating_point", "layout", "__hash__", "requires_grad"}


def load_under_zero_3(
    cls: type[PreTrainedModel], config: PreTrainedConfig, files: Sequence[Path], dtype: torch.dtype
) -> PreTrainedModel:
    """Build a model under `deepspeed.zero.Init` and read its weights from safetensors files. All ranks call it.

    Rank 0 reads each weight once and broadcasts it; the other ranks read only the files' headers. A rank never holds
    more than its part of the model, one whole weight and the inputs of one conversion. Renaming, conversion, tying and
    the initialisation of weights that the files lack are those of `from_pretrained`. It also leaves the model in
    evaluation mode. Under bf16 and fp16, parameters have DeepSpeed's type instead of `dtype`.

    Raises:
        RuntimeError: a weight has another shape than the model's parameter, or cannot be read.
    """
    weights = dict(read_weights(files, values=torch.distributed.get_rank() == 0))
    with no_first_weights(), _raised_on_all_ranks():
        model: PreTrainedModel = cls.from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
    return model


@contextmanager
def _raised_on_all_ranks() -> Iterator[None]:
    """Raise errors of the weights on all ranks: only rank 0 compares them with the model."""
    error: RuntimeError | None = None
    try:
        yield
    except RuntimeError as raised:
        error = raised
    for message in filter(None, gather(None if error is None else str(error))):
        raise RuntimeError(message) from error


class FileTensor(Tensor):
    """A tensor of a safetensors file. It has a shape and a type, and reads its values from the file at each use."""

    file: safe_open
    key: str  # the tensor's name in it

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(getattr(func, "__self__", None), "__name__", "") or getattr(func, "__name__", "")
        if name in _FACTS:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        args, kwargs = tree_map_only(FileTensor, lambda each: each.file.get_tensor(each.key), (args, kwargs or {}))
        return func(*args, **kwargs)


def read_weights(files: Iterable[Path], values: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of safetensors files by name: as `FileTensor`s, or without `values` on the device `meta`.

    The files are read in parts, not mapped: pages of a mapped file count as memory of the process.
    """
    from safetensors import safe_open

    for file in files:
        opened: Any = safe_open(file, framework="pt", backend="pread")
        for name in opened.keys():  # noqa: SIM118 - it is no mapping
            part = opened.get_slice(name)
            weight = torch.empty(part.get_shape(), dtype=torch_type(part.get_dtype()), device="meta")
            if values:
                weight = weight.as_subclass(FileTensor)
                weight.file, weight.key = opened, name
            yield name, weight
