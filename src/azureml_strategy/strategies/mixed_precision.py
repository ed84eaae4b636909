"""Lets modules with float32 buffers train on 16-bit weights, as they do under DDP in `bf16-mixed` and `16-mixed`.

DDP keeps float32 weights, and autocast casts them where they are used. DeepSpeed makes the weights 16-bit, and FSDP2
gathers them so. Buffers stay float32 under all of them: otherwise a running mean would lose its small updates. The
result of an operation with a buffer is float32, and torch refuses most operations between float32 and 16 bits.

Two things help. A normalisation computes with float32 copies of its weights where its statistics or its input are
float32; each copy is as small as a row of activations. And where other buffers are float32, the forward pass runs
under autocast, as DDP's does. A module without such buffers runs as before: its activations take no more memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from typing_extensions import override

from azureml_strategy.strategies.errors import ConfigurationError

# The mixed precisions, and the type that they compute with.
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
HALVES = (torch.bfloat16, torch.float16)
# torch's error messages about two types in one operation.
_TWO_TYPES = re.compile(
    r"same dtype|expected scalar type|have scalar type|match weight dtype|promoting not supported"
    r"|type \((?P<one>.*)\) and \w+ type \((?P<other>.*)\) should be the same"
)
NORM_WITH_STATISTICS = nn.modules.batchnorm._NormBase
"""The base, which torch gives no public name, of all layers that may keep running statistics."""
_NORMALISATIONS = (NORM_WITH_STATISTICS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class MixedPrecisionStrategy(ParallelStrategy):
    """Mix-in before Lightning's DeepSpeed strategy."""

    _restore_module: Callable[[], None] | None = None
    _casts_weights = False

    def mix_precision(self, module: nn.Module, autocast: bool) -> None:
        """Let a module compute with its 16-bit weights beside float32 buffers until `teardown`, see `mix_precision`."""
        plugin, undo = self.precision_plugin, ExitStack()
        undo.callback(mix_precision(module, plugin.precision, self.root_device.type, autocast))
        self._casts_weights = plugin.precision in MIXED and not autocast
        if plugin.precision in MIXED and autocast and type(plugin).convert_input is DeepSpeedPrecision.convert_input:
            # Do not cast the batch, as DDP does not: its floats may be targets, or large numbers that a buffer centers.
            plugin.convert_input = lambda data: data  # type: ignore[method-assign]
            undo.callback(delattr, plugin, "convert_input")
        self._restore_module = undo.close

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.two_types_explained():
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.two_types_explained():
            return super().validation_step(*args, **kwargs)

    @contextmanager
    def two_types_explained(self) -> Iterator[None]:
        """Explain the error of a step that makes a float32 tensor itself. Nothing shows that before it runs."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            found = _TWO_TYPES.search(str(error))
            if not self._casts_weights or found is None:
                raise
            if ("cuda" in (found["one"] or "")) != ("cuda" in (found["other"] or "")):  # one of them is not on a GPU
                raise
            raise ConfigurationError(
                f"With precision={self.precision_plugin.precision!r} the weights are 16-bit here, and the step has "
                f"made a float32 tensor that met them: {error}. Let torch cast where it must: autocast=True as an "
                "argument of the strategy, or strategy.autocast=true in a recipe; or make the tensor of its "
                "neighbour's type: torch.randn_like(x)."
            ) from error

    @override
    def teardown(self) -> None:
        if self._restore_module is not None:
            self._restore_module()
            self._restore_module = None
        super().teardown()


def float32_buffers(module: nn.Module) -> list[str]:
    """Return the names of the buffers of a module whose values meet activations in float32.

    Statistics of normalisations are not among them, because those layers return the type of their input. Neither are
    the tables of models of transformers that no checkpoint holds, such as rotary frequencies: its code casts their
    results, as it expects 16-bit weights.
    """
    return [
        f"{path}.{name}" if path else name
        for path, owner in module.named_modules()
        if not isinstance(owner, NORM_WITH_STATISTICS)
        for name, buffer in owner.named_buffers(recurse=False)
        if (buffer.is_floating_point() or buffer.is_complex())
        and buffer.dtype not in HALVES
        and not (type(owner).__module__.startswith("transformers.") and name in owner._non_persistent_buffers_set)
    ]


def make_contiguous(module: nn.Module) -> None:
    """Lay out parameters as DeepSpeed and FSDP2 need them: they treat a parameter as one row of numbers.

    Weights in channels_last lose that layout. Activations keep it, because convolutions also follow their input.
    """
    for parameter in module.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def mix_precision(module: nn.Module, precision: str, device_type: str, autocast: bool) -> Callable[[], None]:
    """Let a module in DeepSpeed's engine compute with its 16-bit weights beside float32 buffers.

    Args:
        module: what the engine calls.
        precision: as in `Trainer(precision=...)`; only `bf16-mixed` and `16-mixed` change the module.
        device_type: `cuda` or `cpu`.
        autocast: whether the forward pass runs under autocast.

    Returns:
        A function that undoes this.

    Raises:
        ConfigurationError: see `refuse_old_spectral_norm`.
    """
    undo, dtype = ExitStack(), MIXED.get(precision)
    if dtype is not None:
        refuse_old_spectral_norm(module, device_type, precision)
        undo.callback(compute_in_float32_beside_buffers(module, every_normalisation=autocast))
        if autocast:
            undo.callback(autocast_forward(module, device_type, dtype))
    return undo.close


def mix_sharded_precision(module: nn.Module, precision: str, device_type: str) -> Callable[[], None]:
    """Let a module whose weights FSDP2 gathers in 16 bits compute beside float32 buffers and inputs.

    Call it before the module is sharded. Lightning's plugin already has autocast around the steps. On a GPU autocast
    casts the inputs of normalisations, on a CPU it does not.

    Returns:
        A function that undoes this.

    Raises:
        ConfigurationError: see `refuse_old_spectral_norm`.
    """
    mixed = precision in MIXED
    if mixed:
        refuse_old_spectral_norm(module, device_type, precision)
    not_cast = mixed and device_type == "cpu"
    return compute_in_float32_beside_buffers(module, every_normalisation=not_cast or bool(float32_buffers(module)))


def refuse_old_spectral_norm(module: nn.Module, device_type: str, precision: str) -> None:
    """Refuse `torch.nn.utils.spectral_norm` on 16-bit weights on a CPU, where no autocast casts its products."""
    for name, layer in module.named_modules() if device_type == "cpu" else ():
        if any(isinstance(hook, SpectralNorm) for hook in layer._forward_pre_hooks.values()):
            raise ConfigurationError(
                f"{name} has torch.nn.utils.spectral_norm, which multiplies its weight with a float32 buffer, and with "
                f"precision={precision!r} the weight is 16-bit here. Write "
                "torch.nn.utils.parametrizations.spectral_norm instead, which torch recommends; or precision='32-true'."
            )


def compute_in_float32_beside_buffers(module: nn.Module, every_normalisation: bool) -> Callable[[], None]:
    """Let normalisations compute with float32 copies of 16-bit weights where their statistics or input are float32.

    Parametrizations with buffers, such as spectral norms, always compute in float32.

    Args:
        module: whose layers get another `forward`.
        every_normalisation: also those without statistics, such as LayerNorm, where activations may be float32.

    Returns:
        A function that undoes this.
    """
    kinds = _NORMALISATIONS if every_normalisation else NORM_WITH_STATISTICS
    undo = ExitStack()
    for layer in module.modules():
        replaced = layer.__dict__.get("forward")
        if isinstance(replaced, partial) and replaced.func is _forward_in_float32:
            continue  # FSDP2's strategy and a precision plugin may both ask for it
        normalises = isinstance(layer, kinds) and "weight" in layer._parameters
        if normalises or (isinstance(layer, ParametrizationList) and float32_buffers(layer)):
            replace_forward(undo, layer, partial(_forward_in_float32, layer, layer.forward))
    return undo.close


def autocast_forward(module: nn.Module, device_type: str, dtype: torch.dtype) -> Callable[[], None]:
    """Run the calls of a module under autocast, and return a function that ends this.

    DeepSpeed ends every autocast around its engine, so this one begins inside. The module is a LightningModule in the
    engine, or the layers of a stage.
    """
    running: list[torch.autocast] = []  # a step of a LightningModule calls the module again

    def begin(_: nn.Module, __: Any) -> None:
        running.append(torch.autocast(device_type, dtype))
        running[-1].__enter__()  # type: ignore[no-untyped-call]

    def end(_: nn.Module, __: Any, ___: Any) -> None:
        running.pop().__exit__(None, None, None)

    handles = [module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)]

    def remove() -> None:
        for handle in handles:
            handle.remove()
        while running:  # torch calls no hook after a KeyboardInterrupt
            end(module, None, None)

    return remove


def _forward_in_float32(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    parameters = dict(layer.named_parameters(recurse=False))
    if not any(each.dtype in HALVES for each in parameters.values()) or not _needs_float32(layer, args):
        return forward(*args, **kwargs)
    weights = {name: each.float() for name, each in parameters.items()}
    # They shadow the parameters: Python looks into an object's __dict__ before it asks nn.Module for a parameter.
    layer.__dict__.update(weights)
    try:
        return forward(*args, **kwargs)
    finally:
        for name in weights:
            del layer.__dict__[name]


def _needs_float32(layer: nn.Module, args: tuple[Any, ...]) -> bool:
    if isinstance(layer, ParametrizationList):
        return True
    statistics = getattr(layer, "running_mean", None)
    if statistics is not None:
        return bool(statistics.dtype == torch.float32)  # in bf16-true some are bf16 like the weights
    return any(isinstance(each, Tensor) and each.dtype == torch.float32 for each in args)


def replace_forward(undo: ExitStack, layer: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a layer another `forward`, until `undo` is closed."""
    earlier = layer.__dict__.get("forward")  # of activation checkpointing or the user
    layer.forward = forward
    if earlier is None:
        undo.callback(layer.__dict__.pop, "forward", None)
    else:
        undo.callback(setattr, layer, "forward", earlier)
