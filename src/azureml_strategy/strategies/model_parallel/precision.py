"""Lightning's precision plugins, with a gradient norm over parameters that are spread in different ways."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch.optim import Optimizer
from typing_extensions import override

from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.model_parallel.clipping import clip_gradient_norm

# Lightning's own list for this strategy, which it checks only where the strategy is given as an object.
SUPPORTED = ("32-true", "bf16-mixed", "bf16-true", "16-true")


class _NormOverMeshes(Precision):
    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_gradient_norm(self.main_params(optimizer), clip_val)


class FullPrecision(_NormOverMeshes):
    """`32-true`."""


class HalfMeshPrecision(_NormOverMeshes, HalfPrecision):
    """`bf16-true` and `16-true`."""


class MixedMeshPrecision(_NormOverMeshes, MixedPrecision):
    """`bf16-mixed`."""


def for_meshes(plugin: Precision) -> Precision:
    """The plugin to use instead of one that Lightning made; one of the user's own classes is kept.

    Raises:
        ConfigurationError: the precision is not supported.
    """
    if plugin.precision not in SUPPORTED:
        raise ConfigurationError(
            f"Trainer(precision={plugin.precision!r}) does not work with azureml_model_parallel. Choose one of "
            f"{', '.join(SUPPORTED)}; 'bf16-mixed' needs no loss scaling, which sharded gradients would not survive."
        )
    if type(plugin) is Precision:
        return FullPrecision()
    if type(plugin) is HalfPrecision:
        return HalfMeshPrecision(plugin.precision)
    if type(plugin) is MixedPrecision:
        return MixedMeshPrecision("bf16-mixed", plugin.device)
    return plugin
