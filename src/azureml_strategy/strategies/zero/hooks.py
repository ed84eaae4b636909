"""Refuses hooks and steps that read weights which ZeRO-3 has cut between forward passes.

DeepSpeed cuts each parameter after its use, and a tensor of no elements remains. Norms of it are 0, averages and copies
of it are empty, and changes of it have no effect. No error says so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, MethodType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.zero.construction import is_cut, needs_values

# These hooks get what there is to save or load, and Lightning gathers that.
_OF_CHECKPOINTS = ("on_save_checkpoint", "on_load_checkpoint")

_LIBRARIES = ("azureml_strategy.", "deepspeed.", "lightning.")
_GATHER = (
    "Write `with deepspeed.zero.GatheredParameters(list(pl_module.parameters()), modifier_rank=0):` around that code, "
    "on all ranks; or use strategy='azureml_deepspeed_stage_2', which keeps parameters whole."
)


class CutReads(TorchFunctionMode):
    """While it is active, code of the user's in a hook that needs the values of a cut parameter ends in an error.

    Raises:
        ConfigurationError: there is such code.
    """

    def __init__(self, hook: str, module: LightningModule) -> None:
        super().__init__()
        self._hook, self._module = hook, module

    @override
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        cut = [each for each in tree_leaves((args, kwargs)) if is_cut(each)]
        if cut and needs_values(func) and not _is_of_library(code_that_calls()):
            name = next((name for name, each in self._module.named_parameters() if each is cut[0]), "a parameter")
            raise ConfigurationError(
                f"{self._hook} uses {name}, which ZeRO-3 has cut: outside of the forward pass nothing of it is here. "
                f"{_GATHER}"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def whole_parameters_alone(module: LightningModule) -> Iterator[None]:
    """Refuse a training step that goes through the module's parameters where DeepSpeed has cut them.

    A penalty on all weights would count only those that happen to be whole, and the ranks may wait for one another. A
    step may take one parameter, as `next(self.parameters()).device` does: only going on after a cut one is refused.

    Raises:
        ConfigurationError: from the module's `parameters` and `named_parameters`.
    """
    every = module.named_parameters

    def named_parameters(_: LightningModule, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        by_library = _is_of_library(sys._getframe(1))
        for name, parameter in every(*args, **kwargs):
            yield name, parameter
            if is_cut(parameter) and not by_library:
                raise ConfigurationError(
                    f"training_step of {type(module).__name__} goes through its parameters, and ZeRO-3 has cut {name}: "
                    "a sum over them would be wrong. weight_decay of the optimizer replaces a penalty on all weights; "
                    "or use strategy='azureml_deepspeed_stage_2', which keeps parameters whole."
                )

    # A method, as torch.compile asks for its function.
    module.named_parameters = MethodType(named_parameters, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.named_parameters


def code_that_calls() -> FrameType:
    """Return the code that has called torch, from within a `__torch_function__`. Other modes may lie between."""
    frame = sys._getframe(1)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_of_library(frame: FrameType | None) -> bool:
    """Whether a library that knows of cut parameters has called torch, or `state_dict` has, perhaps for buffers."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("torch."):
        if frame.f_code.co_name == "state_dict":
            return True
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(_LIBRARIES)


class WatchedHooks:
    """Refuses reads of cut parameters in hooks of callbacks and of the module, which Lightning profiles."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._module = module
        # Past the profiler's __setattr__: a profiler that wraps another may pass on what is set.
        self._attributes: dict[str, Any] = trainer.profiler.__dict__  # type: ignore[attr-defined]
        self._before = {key: each for key, each in self._attributes.items() if key == "profile"}
        self._profile: Any = trainer.profiler.profile  # type: ignore[attr-defined]
        self._attributes["profile"] = self._watched

    def end(self) -> None:
        """Watch no more."""
        self._attributes.pop("profile", None)
        self._attributes.update(self._before)

    @contextmanager
    def _watched(self, action_name: str) -> Iterator[str]:
        owner, _, hook = action_name.rpartition(".")
        watched = owner.startswith(("[Callback]", "[LightningModule]")) and hook.startswith("on_")
        with self._profile(action_name) as name:
            if not watched or hook in _OF_CHECKPOINTS:
                yield name
                return
            of = f"{hook} of {owner.partition(']')[2]}"
            try:
                with CutReads(of, self._module):
                    yield name
            except RuntimeError as error:
                if "torch.Size([0])" in str(error):  # from load_state_dict, which asks for shapes alone
                    raise ConfigurationError(
                        f"{of} loads weights into parameters that ZeRO-3 has cut. {_GATHER}"
                    ) from error
                raise
