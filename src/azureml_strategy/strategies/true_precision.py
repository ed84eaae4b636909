"""Keeps tables, such as rotary frequencies, and statistics in float32 under `bf16-true` and `16-true`.

Tables that constructors compute are computed in float32 too, although Lightning has torch make 16-bit tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from lightning.fabric.utilities import rank_zero_warn
from numpy import generic, ndarray
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary
from torchmetrics import Metric
from typing_extensions import override

from azureml_strategy.huggingface.transformers_internals import (
    buffers_in_float32,
    computes_frequencies,
    expects_float32_by_default,
    float32_by_default,
    parameters_in_float32,
    reads_weights,
)
from azureml_strategy.strategies.mixed_precision import (
    NORM_WITH_STATISTICS,
    compute_in_float32_beside_buffers,
    replace_forward,
)

# Types and names of functions that make a result float32, whatever torch's default type is.
_CHOSEN = (torch.float32, torch.float64)
_BY_NAME = {"float", "double"}
# Collections in which a module may keep tensors that it has not registered.
_CONTAINERS = (list, tuple, dict)
_OF_MODULE = {"_parameters", "_buffers", "_modules"}
# Tensors that are float32 only because torch's default type was.
_by_default = WeakTensorKeyDictionary()
HALVES = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
"""The precisions that cast a whole module, and the type that they cast it to."""
_STATISTICS = ("running_mean", "running_var")
# How many names a warning lists.
_SHOWN = 4


@contextmanager
def float32_tables(dtype: torch.dtype) -> Iterator[None]:
    """Build modules whose parameters get a type of 16 bits at once, and whose tables are computed in float32."""
    hook = register_module_parameter_registration_hook(partial(_cast_parameter, dtype))
    try:
        with float32_by_default(), _NotesDefaults(dtype):
            yield
    finally:
        hook.remove()


def cast_plain_tensors(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Cast tensors that are no buffers and that Lightning would have made in 16 bits.

    Args:
        module: built under `float32_tables`.
        dtype: their new type.

    Yields:
        The name of each in the module, and its values before.
    """
    for path, owner in module.named_modules() if _by_default else ():
        for name, value in list(vars(owner).items()):
            may_hold = isinstance(value, Tensor) or (type(value) in _CONTAINERS and name not in _OF_MODULE)
            found = [each for each in tree_leaves(value) if _is_default(each)] if may_hold else []
            if found:
                setattr(owner, name, tree_map_only(Tensor, partial(_cast_default, dtype), value))
                yield from ((f"{path}.{name}".lstrip("."), each) for each in found)


class _NotesDefaults(TorchFunctionMode):
    """Notes which tensors would have 16 bits if that was torch's default type.

    If a constructor calls a layer with such a tensor, the layer's parameters have 16 bits already: cast the tensor.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    @override
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, ValueError):
            types_given = {each.dtype for each in given if isinstance(each, Tensor)}
            if not any(_is_default(each) for each in given) or self._dtype not in types_given:
                raise
            args, kwargs = tree_map_only(Tensor, partial(_cast_default, self._dtype), (args, kwargs))
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") not in _BY_NAME and not any(_chooses(each) for each in given):
            known = {id(each) for each in given}
            for each in tree_leaves(result):
                if type(each) is Tensor and each.dtype is torch.float32 and id(each) not in known:
                    _by_default[each] = True
        return result


def _cast_parameter(dtype: torch.dtype, _: nn.Module, __: str, parameter: nn.Parameter | None) -> None:
    # transformers casts the weights that it reads from files itself, except those that it keeps in float32.
    if type(parameter) is nn.Parameter and parameter.dtype is torch.float32 and not reads_weights():
        parameter.data = parameter.data.to(dtype)


def _chooses(given: Any) -> bool:
    """Whether an argument makes a result float32, whatever torch's default type is."""
    if isinstance(given, Tensor):
        return given.dtype in _CHOSEN and not _is_default(given)
    return isinstance(given, (ndarray, generic)) or given in _CHOSEN


def _is_default(given: Any) -> bool:
    return isinstance(given, Tensor) and given in _by_default


def _cast_default(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if _is_default(tensor) else tensor


class _Place(NamedTuple):
    owner: nn.Module
    name: str
    values: Tensor


# The float32 statistics of layers whose own were rounded at the end of a training.
_unrounded: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()


class PreciseConversion:
    """Replaces `convert_module` of Lightning's precision plugins.

    Args:
        plugin: casts the rest of a module.
        keeps_statistics: whether statistics of normalisations stay in float32; asked when a module is cast.
        keeps_parameters: whether parameters stay in float32 that transformers keeps so.
    """

    def __init__(self, plugin: Any, keeps_statistics: Callable[[], bool], keeps_parameters: bool) -> None:
        self._plugin, self._keeps_statistics, self._keeps_parameters = plugin, keeps_statistics, keeps_parameters
        self._undo = ExitStack()
        self._layers: list[nn.Module] = []

    def __call__(self, module: nn.Module) -> nn.Module:
        """Cast a module, except for what must stay precise."""
        dtype = HALVES[self._plugin.precision]
        tables = [_Place(owner, name, owner.get_buffer(name)) for owner, name in buffers_in_float32(module, dtype)]
        for metric in _metrics(module):  # what metrics keep as buffers, such as thresholds
            tables += [_Place(metric, name, values) for name, values in metric.named_buffers(recurse=False)]
        statistics = list(_statistics(module)) if self._keeps_statistics() else []
        rounded = list(_rounded_buffers(module, [*tables, *statistics], dtype))
        rounded += [name for name, values in cast_plain_tensors(module, dtype) if _loses(values, dtype)]
        self._warn_of_rounded(rounded, dtype)
        weights = self._precise_weights(module, dtype)
        with _uncast_metrics(module):
            module = type(self._plugin).convert_module(self._plugin, module)
        for parameter, weight in weights:
            parameter.data = weight
        for owner, name, values in [*tables, *statistics]:
            owner._buffers[name] = values
        self._undo.callback(compute_in_float32_beside_buffers(module, every_normalisation=False))
        self._layers += dict.fromkeys(owner for owner, *_ in statistics)
        for each in filter(computes_frequencies, module.modules()):
            replace_forward(self._undo, each, partial(_call_in_float32, each.forward))
        for each in expects_float32_by_default(module):
            replaced = partial(_call_unless_compiled, each.forward)
            replaced.__wrapped__ = each.forward  # type: ignore[attr-defined] # transformers asks for argument names
            replace_forward(self._undo, each, replaced)
        return module

    def _precise_weights(self, module: nn.Module, dtype: torch.dtype) -> list[tuple[nn.Parameter, Tensor]]:
        named = parameters_in_float32(module, dtype)
        if self._keeps_parameters:
            return [(each, each.detach().float()) for each in named.values()]
        if named:
            rank_zero_warn(
                f"Trainer(precision={self._plugin.precision!r}) makes {_listed(list(named))} {_kind(dtype)} too, which "
                "transformers keeps in float32, as this strategy trains weights of one type. Losses may differ by it, "
                "or overflow in float16. Write strategy='azureml_ddp', which keeps them in float32, or "
                "precision='32-true'."
            )
        return []

    def _warn_of_rounded(self, names: list[str], dtype: torch.dtype) -> None:
        precision = self._plugin.precision
        if names:
            rank_zero_warn(
                f"Trainer(precision={precision!r}) rounds {_listed(names)} to {_kind(dtype)}, as it casts "
                "buffers too. Frequencies and positions are wrong by it in long sequences. Compute such a table in "
                "float32 in forward and cast what comes out of it, or write "
                f"precision={precision.replace('true', 'mixed')!r}, which casts no buffer."
            )

    def end(self) -> None:
        """Leave layers as Lightning's own plugin does, and keep their float32 statistics for a later training."""
        dtype = HALVES[self._plugin.precision]
        self._undo.close()
        for layer in self._layers:
            _unrounded[layer] = {name: layer.get_buffer(name) for name in _STATISTICS}
            layer._buffers |= {name: layer.get_buffer(name).to(dtype) for name in _STATISTICS}
        self._layers = []


def keep_precise(plugin: Any, keeps_statistics: Callable[[], bool], keeps_parameters: bool) -> None:
    """Give a precision plugin of Lightning's a `PreciseConversion`. One of the user's class is left alone."""
    convert = type(plugin).convert_module
    if plugin.precision in HALVES and convert.__module__.startswith("lightning."):
        plugin.convert_module = PreciseConversion(plugin, keeps_statistics, keeps_parameters)
        plugin.module_init_context = float32_by_default  # it begins inside `builds_tables`


def builds_tables(plugin: Any) -> AbstractContextManager[None]:
    """Return the context in which a module is built for a plugin, see `float32_tables`."""
    precise = isinstance(vars(plugin).get("convert_module"), PreciseConversion)
    return float32_tables(HALVES[plugin.precision]) if precise else nullcontext()


def end_precise(plugin: Any) -> None:
    """Undo the changes of modules that a plugin has cast since `keep_precise`."""
    conversion = vars(plugin).get("convert_module")
    if isinstance(conversion, PreciseConversion):
        conversion.end()


def _call_in_float32(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with float32_by_default():
        return forward(*args, **kwargs)


def _call_unless_compiled(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():  # a graph cannot change the default type, and fullgraph=True would fail
        return forward(*args, **kwargs)
    return _call_in_float32(forward, *args, **kwargs)


@contextmanager
def _uncast_metrics(module: nn.Module) -> Iterator[None]:
    """Keep the states of metrics from being cast in this context. `Metric.set_dtype` is there to cast them."""
    kept = [(metric, dict(vars(metric)), dict(metric._defaults)) for metric in _metrics(module)]
    yield
    for metric, attributes, defaults in kept:
        metric._defaults.update(defaults)
        vars(metric).update({name: attributes[name] for name in (*defaults, "_dtype") if name in attributes})


def _metrics(module: nn.Module) -> Iterator[Metric]:
    return (each for each in module.modules() if isinstance(each, Metric))


def _statistics(module: nn.Module) -> Iterator[_Place]:
    for layer in module.modules():
        if isinstance(layer, NORM_WITH_STATISTICS) and isinstance(layer.running_mean, Tensor):
            for name in _STATISTICS:
                rounded = layer.get_buffer(name)
                values = _unrounded.get(layer, {}).get(name, rounded).to(rounded.device)
                same = values.is_meta or torch.equal(values.to(rounded.dtype), rounded)
                yield _Place(layer, name, (values if same else rounded).float())


def _rounded_buffers(module: nn.Module, kept: list[_Place], dtype: torch.dtype) -> Iterator[str]:
    precise = {(each.owner, each.name) for each in kept}
    for path, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if (owner, name) not in precise and _loses(buffer, dtype):
                yield f"{path}.{name}" if path else name


def _loses(buffer: Tensor, dtype: torch.dtype) -> bool:
    """Whether a cast would change values. A tensor that is cut over ranks or has no values counts as exact."""
    if type(buffer) is not Tensor or buffer.is_meta or buffer.dtype not in (torch.float32, torch.float64):
        return False
    return not torch.equal(buffer.to(dtype).to(buffer.dtype), buffer)


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
