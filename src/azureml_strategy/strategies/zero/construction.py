"""Lets code set weights in a constructor whose layers ZeRO-3 has cut already.

Under ZeRO-3, DeepSpeed cuts the parameters of each layer as soon as the layer's `__init__` ends. Each rank keeps a
tensor of no elements. Code that sets weights later, such as the initialisation at the end of a model's `__init__`,
would fill nothing and raise no error. The model would train from other weights than the author's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torchmetrics import Metric
from typing_extensions import override

from azureml_strategy.huggingface.transformers_internals import MODELS, declare_zero_3, inside_zero_init
from azureml_strategy.import_hook import when_imported
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.host_memory import large_blocks_returned

# These functions ask for a tensor's shape, which DeepSpeed keeps of a parameter that it has cut.
_OF_SHAPE = {
    *("shape", "ndim", "nbytes", "size", "dim", "ndimension", "numel", "nelement", "__len__", "stride"),
    *("is_contiguous", "element_size"),
}
# These functions need no values, or print what is there. Some ranks alone may call them.
_WITHOUT_VALUES = {
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "is_floating_point"),
    *("is_complex", "get_device", "data_ptr", "untyped_storage", "new_empty", "new_zeros", "new_ones", "new_full"),
    *("new_tensor", "is_shared", "__repr__", "__format__", "__hash__", "__reduce_ex__"),
}
# Attributes that are tensors with the parameter's values. All others are facts about the parameter.
_VIEWS = {"T", "mT", "H", "mH", "real", "imag"}

# The modules of torch through which DeepSpeed may call a function of a tensor.
_PASSED_THROUGH = ("torch.distributed", "torch.overrides", "torch._tensor")
# The modules of DeepSpeed that cut and gather. Others are layers for models, such as deepspeed.moe.
_CUTTING = ("deepspeed.runtime", "deepspeed.comm", "deepspeed.utils", "deepspeed.accelerator")


class CutView(Tensor):
    """Stands for a view of a cut parameter, such as `weight.data`. It has no values.

    Attributes:
        parameter: the parameter that DeepSpeed has cut.
        outline: a tensor on the device `meta` with the view's shape.
        whole: makes the view while the parameter is whole.
    """

    parameter: nn.Parameter
    outline: Tensor
    whole: Callable[[], Tensor]

    @classmethod
    def of(cls, parameter: nn.Parameter, outline: Tensor, whole: Callable[[], Tensor]) -> CutView:
        """Return the view that `whole` makes, with the shape of `outline`."""
        view = outline.as_subclass(cls)
        view.parameter, view.outline, view.whole = parameter, outline, whole
        return view

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise ConfigurationError(
            f"{name_of(func)} uses a view that configure_model took of a parameter cut by ZeRO-3, such as weight.data, "
            "after configure_model. Keep a copy there: weight.detach().clone()."
        )


class GatherForUse(TorchFunctionMode):
    """While it is active, code that reads or sets a parameter that DeepSpeed has cut finds it whole.

    The parameter is gathered for each call of torch, and cut again after it. Rank 0's values win, so that the ranks
    agree whatever their random generators do. All ranks must run the same code: gathering is a collective.

    Raises:
        ConfigurationError: a parameter is to get another shape or type, or a new one is made of a cut one's memory.
    """

    @override
    def __enter__(self) -> GatherForUse:
        self._hook = register_module_parameter_registration_hook(_require_values)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @override
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, value, traceback)  # type: ignore[no-untyped-call]
        self._hook.remove()

    @override
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        cut = [each for each in tree_leaves((args, kwargs)) if isinstance(each, CutView) or is_cut(each)]
        if not cut or _is_called_by_deepspeed():
            return func(*args, **kwargs)
        name, first = name_of(func), cut[0]
        if name in _OF_SHAPE:
            return func(_outline(first), *args[1:], **kwargs)
        sets = getattr(func, "__name__", "") == "__set__"
        if name == "detach" or (name == "data" and not sets):
            return CutView.of(_owner(first), _outline(first), lambda: func(_whole(first)))
        if name == "data" and not isinstance(first, CutView):
            return _set_data(args[0], args[1])
        if name in _WITHOUT_VALUES or (_is_attribute(func) and name not in _VIEWS):
            empty = tree_map_only(CutView, lambda view: view.parameter.data, tuple(args))
            result = func(*empty, **kwargs)
            return args[0] if result is empty[0] else result
        return _call(func, args, kwargs)


class Construction:
    """What a ZeRO-3 strategy adds to the code that builds a model under `deepspeed.zero.Init`.

    transformers is told that DeepSpeed cuts parameters until `end`. Then some of its functions gather for themselves.
    What it builds outside of `under` is whole. It is not imported for that, but may be while the model is built.
    """

    def __init__(self) -> None:
        self._declared: object | None = None
        self._cuts = False

    @contextmanager
    def under(self, config: dict[str, Any]) -> Iterator[None]:
        """Run the code that builds the model in this context, inside that of `deepspeed.zero.Init`.

        Raises:
            ConfigurationError: transformers is there without accelerate; or see `GatherForUse`.
        """
        with ExitStack() as stack:

            def declare(_: ModuleType) -> None:
                if find_spec("accelerate") is None:
                    raise ConfigurationError(
                        "transformers builds models under ZeRO-3 only with accelerate, which is not installed here. "
                        "Type: pip install accelerate; or choose azureml_deepspeed_stage_2, which cuts no parameters."
                    )
                self._declared = declare_zero_3(config, lambda: self._cuts)
                stack.enter_context(inside_zero_init())

            stack.callback(when_imported(MODELS, declare))
            stack.enter_context(large_blocks_returned())
            stack.enter_context(GatherForUse())
            self._cuts = True
            try:
                yield
            finally:
                self._cuts = False

    def end(self) -> None:
        """Tell transformers that nothing is cut any more."""
        self._declared = None


def place_all_but_parameters(module: nn.Module, device: torch.device) -> None:
    """Move buffers and the states of metrics to the device of this process.

    DeepSpeed moves a module whose parameters it has cut in `configure_model` to no device. It makes tensors of
    `torch.zeros` and a few other functions on the GPU, but not those of `torch.linspace`, nor of an `__init__`.
    """
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # with the buffer, so that no other one gets its number
    for part in module.modules():
        if isinstance(part, Metric):
            part.to(device)
            continue
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            if not buffer.is_meta:
                _, there = moved.setdefault(id(buffer), (buffer, buffer.to(device)))
                setattr(part, name, there)


def _call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function on whole parameters. Results that are views of them become `CutView`s."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    with _gathered(tensors) as owners:
        whole = {id(each): _whole(each) for each in tensors}
        same = {id(whole[id(each)]): each for each in tensors}
        memory = {each.untyped_storage().data_ptr(): each for each in owners}

        def call(find: Callable[[Tensor], Tensor]) -> Any:
            whole_args, whole_kwargs = tree_map_only(Tensor, find, (tuple(args), kwargs))
            return func(*whole_args, **whole_kwargs)

        def cut_again(index: int, tensor: Any) -> Any:
            if not isinstance(tensor, Tensor) or id(tensor) in same:
                return same.get(id(tensor), tensor)
            owner = memory.get(tensor.untyped_storage().data_ptr())
            if owner is None:
                return tensor
            outline = tensor.new_empty(0, device="meta").as_strided(tensor.size(), tensor.stride())
            return CutView.of(owner, outline, lambda: tree_leaves(call(_whole))[index])

        leaves, structure = tree_flatten(call(lambda each: whole[id(each)]))
        return tree_unflatten([cut_again(index, leaf) for index, leaf in enumerate(leaves)], structure)


def _set_data(parameter: nn.Parameter, value: Tensor) -> None:
    """Set a cut parameter's values, as `parameter.data = value` does with a whole one."""
    shape, kind = _outline(value).shape if _has_no_values(value) else value.shape, value.dtype
    if shape != _outline(parameter).shape or kind != parameter.dtype:
        raise ConfigurationError(
            f"A parameter of {tuple(_outline(parameter).shape)} in {parameter.dtype} is to become {tuple(shape)} in "
            f"{kind} after ZeRO-3 has cut it. Set it in the __init__ of its own layer; the type of all parameters is "
            "that of Trainer(precision=...)."
        )
    with _gathered([parameter, value]):
        parameter.data.copy_(_whole(value))


@contextmanager
def _gathered(tensors: Iterable[Tensor]) -> Iterator[list[nn.Parameter]]:
    """Gather the cut parameters that tensors are, or are views of, for this context. This is a collective."""
    import deepspeed

    owners = list({id(_owner(each)): _owner(each) for each in tensors if _has_no_values(each)}.values())
    with deepspeed.zero.GatheredParameters(owners, modifier_rank=0):
        yield owners


def _require_values(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Refuse a new parameter that is made of a cut one: it would have no elements."""
    if parameter is None or is_cut(parameter):
        return
    if isinstance(parameter, CutView) or tuple(parameter.shape) == (0,):
        raise ConfigurationError(
            f"{type(module).__name__}.{name} is a new parameter made of one that ZeRO-3 has cut, so it has no values. "
            f"Share it: module.{name} = other.weight. Or copy it: module.{name} = "
            "torch.nn.Parameter(other.weight.detach().clone())."
        )


def _has_no_values(each: Any) -> bool:
    return (isinstance(each, CutView) and is_cut(each.parameter)) or is_cut(each)


def is_cut(each: Any) -> bool:
    """Whether something is a parameter of which only a part is on this rank now."""
    return isinstance(each, Tensor) and hasattr(each, "ds_status") and each.ds_status.name == "NOT_AVAILABLE"


def _owner(each: Any) -> nn.Parameter:
    owner: nn.Parameter = each.parameter if isinstance(each, CutView) else each
    return owner


def _whole(each: Tensor) -> Tensor:
    return each.whole() if isinstance(each, CutView) else each


def _outline(each: Any) -> Tensor:
    """Return a tensor without memory that has the shape of a cut parameter or of a view."""
    outline: Tensor = each.outline if isinstance(each, CutView) else each.new_empty(each.ds_shape, device="meta")
    return outline


def _is_attribute(func: Any) -> bool:
    return getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")


def name_of(func: Any) -> str:
    """Return the name of a function or method of torch, or of the attribute that is read or set."""
    return str(getattr(func.__self__ if _is_attribute(func) else func, "__name__", ""))


def needs_values(func: Any) -> bool:
    """Whether a function or attribute of torch needs the values of a tensor, which are not there if it is cut."""
    name = name_of(func)
    return name not in _OF_SHAPE | _WITHOUT_VALUES and not (_is_attribute(func) and name not in {*_VIEWS, "data"})


def _is_called_by_deepspeed() -> bool:
    """Whether DeepSpeed called torch, not the user's code. DeepSpeed means the tensor without elements."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PASSED_THROUGH):
        frame = frame.f_back
    return bool(frame.f_globals.get("__name__", "").startswith(_CUTTING))
