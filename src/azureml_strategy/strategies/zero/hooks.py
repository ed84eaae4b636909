"""Refuses hooks that read weights of which ZeRO-3 leaves nothing between forward passes.

DeepSpeed cuts each parameter after its use, and a tensor of no elements remains. Norms of it are 0, averages and copies
of it are empty, and changes of it change nothing, all of it without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.zero.construction import is_called_by_deepspeed, is_cut, needs_values

# They are called with what there is to save or load, and Lightning gathers that.
_OF_CHECKPOINTS = ("on_save_checkpoint", "on_load_checkpoint")


class CutReads(TorchFunctionMode):
    """While it is active, code of the user's that needs the values of a cut parameter ends in an error.

    Args:
        hook: what runs.
        module: has the parameters.

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
        if cut and needs_values(func) and not is_called_by_deepspeed("azureml_strategy"):
            name = next((name for name, each in self._module.named_parameters() if each is cut[0]), "a parameter")
            raise ConfigurationError(
                f"{self._hook} uses {name}, which ZeRO-3 has cut: outside of the forward pass nothing of it is here. "
                "Write `with deepspeed.zero.GatheredParameters(list(pl_module.parameters()), modifier_rank=0):` around "
                "that code, on all ranks; or use strategy='azureml_deepspeed_stage_2', which keeps parameters whole."
            )
        return func(*args, **(kwargs or {}))


class WatchedHooks:
    """Refuses reads of cut parameters in the hooks of callbacks and of the module, which Lightning profiles.

    Args:
        trainer: about to train.
        module: what it trains.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._module = module
        self._profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        self._profile = self._profiler.profile
        self._profiler.profile = self._watched

    def end(self) -> None:
        """Watch no more."""
        vars(self._profiler).pop("profile", None)

    @contextmanager
    def _watched(self, action_name: str) -> Iterator[str]:
        owner, _, hook = action_name.rpartition(".")
        watched = owner.startswith(("[Callback]", "[LightningModule]")) and hook.startswith("on_")
        with self._profile(action_name) as name:
            if not watched or hook in _OF_CHECKPOINTS:
                yield name
                return
            with CutReads(f"{hook} of {owner.partition(']')[2]}", self._module):
                yield name
