"""Finds what would make the host wait for a GPU in the steps of a training, on a machine that has none.

azureml-strategy train gpt_ddp trainer=cpu "callbacks={watch:{_target_:tests.synchronisations.Watch,path:here.json}}"

Tensors of the CPU play both parts. The device of the training is `cpu:0`, and the host is `cpu`, which for torch is the
same memory. What is made or moved there by its name, and what is computed of such tensors, counts as the device's. Then
each call is a synchronisation that on CUDA has the host wait until the device has computed: reading a number, copying
without `non_blocking`, an operation whose result has as many elements as its input tells. torch names the same ones
under `torch.cuda.set_sync_debug_mode`, by which `tests.gpu.watching` finds them on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from lightning.fabric.utilities import apply_func
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

DEVICE, HOST = torch.device("cpu", 0), torch.device("cpu")
# Operations whose result is a number of the host, or has a size that the host must know.
_READS = {
    *("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2"),
    *("aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::_linalg_check_errors"),
    "aten::is_nonzero",
}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
_TO_HOST = {"tolist", "numpy", "__array__", "__repr__", "__str__"}


class DeviceTensors:
    """Which tensors play those of the device, by their memory."""

    def __init__(self) -> None:
        self._memory: set[StorageWeakRef] = set()

    def add(self, *values: Any) -> None:
        for tensor in _plain(values):
            self._memory.add(StorageWeakRef(tensor.untyped_storage()))
        if len(self._memory) > 20_000:
            self._memory = {each for each in self._memory if not each.expired()}

    def discard(self, tensor: Tensor) -> None:
        self._memory.discard(StorageWeakRef(tensor.untyped_storage()))

    def has(self, tensor: Any) -> bool:
        return any(StorageWeakRef(each.untyped_storage()) in self._memory for each in _plain(tensor))


def _plain(values: Any) -> Iterator[Tensor]:
    """The tensors among values that have memory of their own: what a DTensor, or another such one, is made of."""
    for tensor in tree_leaves(values):
        if not isinstance(tensor, Tensor) or tensor.is_meta or isinstance(tensor, FakeTensor):
            continue
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from _plain([getattr(tensor, name) for name in names])
        elif tensor.layout == torch.strided:
            yield tensor


class _Operations(TorchDispatchMode):
    """Follows each operation, of the backward pass and of C++ too."""

    def __init__(self, tensors: DeviceTensors, found: Callable[[str], None]) -> None:
        super().__init__()
        self._tensors, self._found = tensors, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, (DTensor, AsyncCollectiveTensor)) for each in types):
            return NotImplemented  # it is first to be taken apart
        if any(issubclass(each, FakeTensor) for each in types):
            return func(*args, **kwargs)
        name = func._schema.name
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        ours = any(map(self._tensors.has, given))
        if ours and (name in _READS or self._waits(name, args, kwargs)):
            self._found(name)
        result = func(*args, **kwargs)
        if name in ("aten::copy_", "aten::_foreach_copy_"):
            return result  # which stays where it was
        if ours or kwargs.get("device") == DEVICE:
            self._tensors.add(result)
        return result

    def _waits(self, name: str, args: Any, kwargs: Any) -> bool:
        if name == "aten::copy_":
            frames = islice(walk_stack(sys._getframe(1)), 8)
            if any(each.f_code.co_filename == distributed_c10d.__file__ for each, _ in frames):
                return False  # gloo's collectives have memory of their own
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            return not non_blocking and self._tensors.has(args[0]) != self._tensors.has(args[1])
        if name == "aten::repeat_interleave":
            return kwargs.get("output_size") is None
        if name in _INDEXING and self._tensors.has(args[0]):
            return any(self._index_waits(each, args[2:]) for each in args[1] if each is not None)
        return False

    def _index_waits(self, index: Tensor, values: Any) -> bool:
        if index.dtype in (torch.bool, torch.uint8):  # a number is written by masked_fill, without the number of places
            return not values or values[0].numel() > 1
        return not self._tensors.has(index)  # the host's numbers are copied first


class _Calls(TorchFunctionMode):
    """Follows Python's calls that move tensors, of which no operation tells where both devices are the CPU."""

    def __init__(self, tensors: DeviceTensors, found: Callable[[str], None]) -> None:
        super().__init__()
        self._tensors, self._found = tensors, found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if name == "__get__" and func.__self__ is Tensor.device:
            return DEVICE if self._tensors.has(first) else func(*args)
        if func in (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor):
            return self._made(func, args, kwargs)
        if func in (Tensor.to, Tensor.cpu) and isinstance(first, Tensor):
            return self._moved(func, args, kwargs)
        if name in _TO_HOST and isinstance(first, Tensor) and self._tensors.has(first):
            self._found(name)
        return func(*args, **kwargs)

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        if isinstance(args[1] if func is Tensor.new_tensor else args[0] if args else kwargs.get("data"), Tensor):
            return func(*args, **kwargs)
        wanted = kwargs.get("device")
        on_device = self._tensors.has(args[0]) if wanted is None and func is Tensor.new_tensor else _is_device(wanted)
        result: Tensor = func(*args, **kwargs)
        if on_device:
            self._found(func.__name__)
            self._tensors.add(result)
        return result

    def _moved(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        tensor, *rest = args
        if func is Tensor.cpu:
            rest, kwargs = [HOST], {}
        places = [each for each in (*rest, kwargs.get("device")) if isinstance(each, (str, torch.device, Tensor))]
        if not places:
            return func(*args, **kwargs)
        (wanted,) = places
        if sys._getframe(2).f_code.co_filename == clip_grad.__file__:
            return func(*args, **kwargs)  # to the device that C++ has grouped the gradients by, the tensor's own
        is_there = self._tensors.has(tensor)
        to_device = self._tensors.has(wanted) if isinstance(wanted, Tensor) else _is_device(wanted)
        if not isinstance(wanted, Tensor) and torch.device(wanted).type == "meta":
            return func(*args, **kwargs)
        types = [each for each in (*rest, kwargs.get("dtype")) if isinstance(each, torch.dtype)]
        if isinstance(wanted, Tensor):
            types = [wanted.dtype]
        if is_there == to_device:
            return tensor.to(*types, copy=bool(kwargs.get("copy"))) if types or kwargs.get("copy") else tensor
        flags = [each for each in rest if isinstance(each, bool)]
        if not (kwargs.get("non_blocking") or any(flags[:1])):
            self._found("to the device" if to_device else "to the host")
        moved = tensor.to(*types, copy=True) if types else tensor.clone()
        self._tensors.add(moved) if to_device else self._tensors.discard(moved)
        return moved


def _is_device(place: Any) -> bool:
    return place is not None and torch.device(place) == DEVICE


class Watch(Callback):
    """Writes each synchronisation of the steps from the third on, and of evaluation steps from the second on.

    What lies between two steps counts as well: loader, schedulers, loggers, callbacks. Steps that log do not.

    Args:
        path: of a JSON file for each rank, as `here.0.json`: how often each was seen, by its line and what it is.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = Path(path).absolute()
        self._found: Counter[str] = Counter()
        self._counts = False
        self._steps = 0
        self._tensors = DeviceTensors()
        self._stack = ExitStack()
        CPUAccelerator.get_parallel_devices = staticmethod(lambda devices: [DEVICE] * devices)  # type: ignore[method-assign]
        _fully_shard._get_device_from_mesh = lambda mesh: DEVICE
        _fsdp_init._move_states_to_device = lambda *_: None  # all are there
        apply_func._BLOCKING_DEVICE_TYPES = ()  # as for a GPU, to which Lightning copies batches without waiting

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            if "deepspeed" in sys.modules:
                for name in ("device_name", "current_device_name"):
                    setattr(
                        sys.modules["deepspeed"].accelerator.cpu_accelerator.CPU_Accelerator,
                        name,
                        lambda *_: str(DEVICE),
                    )
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            if scaler is not None:
                scaler._device = DEVICE
            self._stack.enter_context(_Operations(self._tensors, self._note))
            self._stack.enter_context(_Calls(self._tensors, self._note))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self._tensors.add(list(pl_module.parameters()), list(pl_module.buffers()))
        if batch_idx >= 2 * trainer.accumulate_grad_batches:  # DDP arranges its buckets anew in the second step
            self._counts = True
            self._steps += 1

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tensors.add([each.grad for each in pl_module.parameters()])  # DDP's memory for them is made in C++

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        # What follows the last step of an epoch or a training is no part of a step.
        self._counts &= not trainer.is_last_batch and not trainer.fit_loop.epoch_loop._is_training_done

    def on_validation_start(self, *_: Any) -> None:
        self._counts = False

    def on_validation_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self._counts = batch_idx > 0

    def on_validation_batch_end(self, *_: Any) -> None:
        self._counts = False

    def on_train_end(self, *_: Any) -> None:
        self._counts = False

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stack.close()
        path = self._path.with_suffix(f".{trainer.global_rank}.json")
        path.write_text(json.dumps({"steps": self._steps, "found": self._found}))

    def _note(self, what: str) -> None:
        if self._counts:
            self._found[f"{where()}: {what}"] += 1


def where(*machinery: str) -> str:
    """The innermost lines outside of torch and of these files, and of this package: `file:line in function`."""
    frames = list(_frames(sys._getframe(1), {__file__, *machinery}))
    own = next((each for each in frames if "azureml_strategy/" in each), "")
    return frames[0] if not own or own == frames[0] else f"{frames[0]}, called in {own}"


def _frames(frame: FrameType | None, machinery: set[str]) -> Iterator[str]:
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and name not in machinery and not name.startswith("<"):
            short = name.partition("site-packages/")[2] or name.partition("/src/")[2] or name
            yield f"{short}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
