"""What a training may do beside one backward pass and one step for each batch, under DeepSpeed's optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from azureml_strategy.lightning_internals import optimizers_of
from azureml_strategy.strategies.deepspeed_internals import (
    begin_further_backward,
    can_add_gradients,
    discard_gradients,
    end_further_backward,
)
from azureml_strategy.strategies.zero.edited_weights import EditedWeights
from azureml_strategy.strategies.zero.refusals import (
    StartingParameters,
    refuse_group,
    refuse_optimizers,
    refuse_own_backward,
    refuse_second_backward,
)


class WatchedTrainingStrategy(DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy, but it refuses steps that DeepSpeed would take wrongly, and keeps edits."""

    _starting: StartingParameters | None = None
    _edited: EditedWeights | None = None
    _awaits_step = False

    @override
    def _init_optimizers(self) -> tuple[Optimizer, LRSchedulerConfig | None]:
        assert self.lightning_module is not None
        optimizers, schedulers = optimizers_of(self.lightning_module)
        refuse_optimizers(self.lightning_module, optimizers, schedulers)
        return optimizers[0], schedulers[0] if schedulers else None

    def begin_training(self, starting: StartingParameters, engine: Any) -> None:
        """Watch a training whose engine is made.

        Args:
            starting: what trained before.
            engine: DeepSpeed's.
        """
        self._starting, self._awaits_step = starting, False
        self.watch_edits(engine)
        optimizer, forget = engine.optimizer, engine.optimizer.zero_grad

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            if self._awaits_step:
                discard_gradients(engine)
                self._awaits_step = False
            forget(*args, **kwargs)

        optimizer.zero_grad = zero_grad
        if not hasattr(optimizer, "add_param_group"):
            optimizer.add_param_group = refuse_group

    def watch_edits(self, engine: Any) -> None:
        """Keep edits of the weights from now on, in a training whose engine is made."""
        self._edited = EditedWeights(engine)

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
        assert self.lightning_module is not None
        engine: Any = self.model
        if self._awaits_step and not can_add_gradients(engine):
            refuse_second_backward(self.lightning_module)
        if self._starting is not None:
            self._starting.require_same()
        earlier = begin_further_backward(engine) if self._awaits_step else {}
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        end_further_backward(engine, earlier)
        self._awaits_step = True
        return loss

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        engine: Any = self.model
        steps = engine.global_steps

        def before_step() -> Any:
            loss = closure()
            assert self.lightning_module is not None
            if not self._awaits_step and not self.lightning_module.automatic_optimization:
                refuse_own_backward(self.lightning_module)
            self._awaits_step = False  # DeepSpeed's step calls zero_grad before it takes the gradients
            return loss

        output = super().optimizer_step(optimizer, before_step, *args, **kwargs)
        if self._edited is not None and engine.global_steps != steps:
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
        self._starting = self._edited = None
        super().teardown()
