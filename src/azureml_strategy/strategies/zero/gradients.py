"""Watches backward passes and steps of a training under DeepSpeed, and hooks that look for gradients, which DeepSpeed
keeps in buffers of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.types import Steppable
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from azureml_strategy.gradients import clip_grad_norm, clip_grad_value
from azureml_strategy.lightning_internals import optimizers_of
from azureml_strategy.strategies.deepspeed_internals import drop_stale_gradients, forget_gradients, is_of_zero
from azureml_strategy.strategies.zero.hooks import code_that_calls
from azureml_strategy.strategies.zero.refusals import refuse_optimizers, refuse_own_backward
from azureml_strategy.strategies.zero.watched_engine import EditedWeights, WatchedEngine

_GRAD: Any = Tensor.grad
# These packages know where the gradients are.
_INFORMED = ("azureml_strategy", "deepspeed")


class GradientReads(TorchFunctionMode):
    """While it is active, it notices code that reads or sets the `.grad` of a parameter whose gradient is elsewhere.

    Attributes:
        found: whether there was such code.
    """

    def __init__(self, elsewhere: Callable[[nn.Parameter], bool]) -> None:
        super().__init__()
        self._elsewhere = elsewhere
        self.found = False

    @override
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.found and getattr(func, "__self__", None) is _GRAD and isinstance(args[0], nn.Parameter):
            caller = str(code_that_calls().f_globals.get("__name__")).partition(".")[0]
            self.found = self._elsewhere(args[0]) and caller not in _INFORMED
        return func(*args, **(kwargs or {}))


class BufferedGradientsPrecision(DeepSpeedPrecision):
    """Lightning's plugin for DeepSpeed, but it says where gradients are, and `self.clip_gradients` clips.

    Lightning's leaves all clipping to DeepSpeed, which clips to `Trainer(gradient_clip_val=...)` within its step.
    Whatever else a module asks for, by its own configure_gradient_clipping or by hand, would be left out in silence.
    """

    _module: LightningModule | None = None
    _has_warned = False

    def look_at(self, module: LightningModule | None) -> None:
        """Set the module whose gradients are clipped; None after the training."""
        self._module = module

    @override
    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        with self._noticing():
            return super().post_backward(tensor, module)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Steppable, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        # Ask DeepSpeed before the step, in which its count moves. Lightning's count begins anew with each epoch.
        engine: Any = model.trainer.model
        steps = False

        def counted() -> Any:
            nonlocal steps
            loss = closure()
            steps = _ends_step(model)
            return loss

        output = super().optimizer_step(optimizer, model, counted, **kwargs)
        if steps:
            forget_gradients(engine)
        return output

    @override
    def _after_closure(self, model: LightningModule, optimizer: Steppable) -> None:
        # Lightning calls this after each batch, as DeepSpeed counts the batches of a step itself. Before the last one
        # there is nothing to see or to clip. Under other strategies the hooks come once a step, too.
        if _ends_step(model):
            drop_stale_gradients(model.trainer.model)
            with self._noticing():
                super()._after_closure(model, optimizer)
            strategy: Any = model.trainer.strategy
            strategy.take_edits()

    @override
    def _clip_gradients(self, model: LightningModule | nn.Module, *args: Any, **kwargs: Any) -> None:
        # Lightning's own hook clips to the Trainer's number, as DeepSpeed does in its step.
        if is_overridden("configure_gradient_clipping", model, LightningModule):
            super()._clip_gradients(model, *args, **kwargs)

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if self._module is None or clip_val <= 0:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            clip_grad_value(self._module, clip_val)
        else:
            clip_grad_norm(self._module, clip_val)

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Warn once of a hook that looks for gradients where they are not."""
        if self._has_warned:
            yield
            return
        reads = GradientReads(is_of_zero)
        try:
            with reads:
                yield
        finally:
            if reads.found:
                self._has_warned = True
                rank_zero_warn(
                    "A hook reads or sets the .grad of a parameter, but DeepSpeed keeps gradients in buffers of its "
                    "own: norms of .grad are wrong, and changes of it have no effect. Use grad_norm, clip_grad_norm, "
                    "clip_grad_value, edit_gradients or full_gradients of azureml_strategy.gradients, in "
                    "on_before_optimizer_step(); they take the LightningModule."
                )


class WatchedTrainingStrategy(DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy. It refuses steps that DeepSpeed would take wrongly, and trains edited weights."""

    # Edits between the steps of a training.
    _edited: EditedWeights | None = None
    # The engine of a training; None in a pipeline, whose engine runs the backward passes itself.
    _watched: WatchedEngine | None = None

    @property
    def clips_by_hook(self) -> bool:
        """Whether the module clips by a hook of its own, instead of DeepSpeed."""
        can_clip = isinstance(self.precision_plugin, BufferedGradientsPrecision)
        return can_clip and is_overridden("configure_gradient_clipping", self.lightning_module, LightningModule)

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        if isinstance(self.precision_plugin, BufferedGradientsPrecision):
            self.precision_plugin.look_at(self.lightning_module)

    @override
    def _init_optimizers(self) -> tuple[Optimizer, LRSchedulerConfig | None]:
        assert self.lightning_module is not None
        optimizers, schedulers = optimizers_of(self.lightning_module)
        refuse_optimizers(self.lightning_module, optimizers, schedulers)
        return optimizers[0], schedulers[0] if schedulers else None

    def take_edits(self) -> None:
        """Take edits of the weights into the copies that are trained: before a step, or a checkpoint."""
        if self._edited is not None:
            self._edited.take()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._edited is not None:
            self._edited.take_whole()
        return super().training_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self._watched is not None:
            self._watched.before_backward()
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        if self._watched is not None:
            self._watched.after_backward()
        return loss

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        steps, watched = self.deepspeed_engine.global_steps, self._watched

        def before_step() -> Any:
            loss = closure()
            assert self.lightning_module is not None
            if watched is not None:
                if not watched.awaits_step and not self.lightning_module.automatic_optimization:
                    refuse_own_backward(self.lightning_module)
                watched.awaits_step = False  # DeepSpeed's step calls zero_grad before it takes the gradients
            return loss

        output = super().optimizer_step(optimizer, before_step, *args, **kwargs)
        if self._edited is not None and self.deepspeed_engine.global_steps != steps:
            self._edited.remember()
        return output

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        loaded = super().load_checkpoint(checkpoint_path, weights_only)
        if self._edited is not None:
            self._edited.remember()
        return loaded

    @override
    def teardown(self) -> None:
        if isinstance(self.precision_plugin, BufferedGradientsPrecision):
            self.precision_plugin.look_at(None)
        self._edited = self._watched = None
        super().teardown()


def with_buffered_gradients(plugin: Precision) -> Precision:
    """Replace a precision plugin that Lightning made by ours; a plugin of the user's own class is kept."""
    if type(plugin) is DeepSpeedPrecision:
        return BufferedGradientsPrecision(plugin.precision)  # type: ignore[arg-type]
    return plugin


def _ends_step(module: LightningModule) -> bool:
    strategy: Any = module.trainer.strategy
    return bool(strategy.ends_step())  # under ZeRO, DeepSpeed's count; in a pipeline each batch is a step
