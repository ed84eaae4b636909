"""Norms, clipping and edits of gradients that are right under every strategy.

A parameter's `.grad` is the gradient under DDP alone. Under FSDP2 and tensor parallelism it is a part, under ZeRO there
is none, and in a pipeline a rank has those of its stage. These functions see the gradients that the optimizer will use:
averaged over ranks, summed over accumulated batches, without a loss scale.

Call them on all ranks: most are collectives. The place is `on_before_optimizer_step`, or with manual optimization and
in Fabric between the last backward pass and the step:

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self))
        clip_grad_norm(self, 1.0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning.fabric.wrappers import is_wrapped
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from azureml_strategy.interfaces import AveragesGradients
from azureml_strategy.lightning_internals import accumulates, precision_of, trainer_of
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.gradient_parts import (
    Gradient,
    MeshGradient,
    Norms,
    change_parts,
    clip_norm,
    clip_value,
    gradients_of,
)

__all__ = [
    "clip_grad_norm",
    "clip_grad_value",
    "edit_gradients",
    "full_gradients",
    "grad_norm",
    "scale_gradients",
    "total_norm",
]


def grad_norm(module: nn.Module, norm_type: float | str = 2, group_separator: str = "/") -> dict[str, Tensor]:
    """Return the norm of each gradient and of all, as `lightning.pytorch.utilities.grad_norm` does in one process.

    In a pipeline, the norms of parameters are those of this rank's stage, and the total is that of all stages. Under
    local SGD they are this replica's.

    Args:
        module: the LightningModule, or a part of it; the module that `fabric.setup` has returned.
        norm_type: p of the p-norm; `inf` for the largest absolute value.
        group_separator: stands between the kind of norm and the name of the parameter.

    Returns:
        Scalars by name, such as `grad_2.0_norm/layer.weight`, and `grad_2.0_norm_total`; empty without gradients.

    Raises:
        ConfigurationError: at this moment there are no gradients, or they are not those of the step.
    """
    found, p = _Gradients.of(module), _checked(norm_type)
    norms = found.norms(p)
    names = [f"grad_{p}_norm{group_separator}{each.name}" for each in found.gradients]
    return {**dict(zip(names, norms.each, strict=True)), f"grad_{p}_norm_total": norms.total} if names else {}


def total_norm(module: nn.Module, norm_type: float | str = 2) -> Tensor:
    """Return the norm of all gradients as one vector: the number of one process that has all of them.

    Args:
        module: as for `grad_norm`.
        norm_type: as for `grad_norm`.

    Returns:
        A scalar, the same on all ranks.

    Raises:
        ConfigurationError: as for `grad_norm`.
    """
    return _Gradients.of(module).norms(_checked(norm_type)).total


def clip_grad_norm(module: nn.Module, max_norm: float, norm_type: float | str = 2) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        module: as for `grad_norm`.
        max_norm: the largest norm that the gradients may have together.
        norm_type: as for `grad_norm`.

    Returns:
        The norm before, the same on all ranks.

    Raises:
        ConfigurationError: as for `grad_norm`.
    """
    found = _Gradients.of(module)
    norm = found.norms(_checked(norm_type)).total
    clip_norm(found.gradients, max_norm, norm)
    return norm


def clip_grad_value(module: nn.Module, clip: float) -> None:
    """Bring each number of the gradients between `-clip` and `clip`, as `torch.nn.utils.clip_grad_value_` does.

    Args:
        module: as for `grad_norm`.
        clip: the largest absolute value.

    Raises:
        ConfigurationError: as for `grad_norm`.
    """
    clip_value(_Gradients.of(module).gradients, clip)


def full_gradients(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter's name and whole gradient, for reading: a change may have no effect.

    One gradient after the other is gathered on all ranks, so that there is memory for one at a time. All ranks must
    go through to the end. In a pipeline they are those of this rank's stage.

    Args:
        module: as for `grad_norm`.

    Yields:
        The name, and the gradient in the parameter's shape.

    Raises:
        ConfigurationError: as for `grad_norm`; or AutoTP has cut a parameter.
    """
    for each in _Gradients.of(module).gradients:
        yield each.name, _unscaled(each)


def edit_gradients(module: nn.Module, edit: Callable[[str, Tensor], Tensor | None]) -> None:
    """Let a function change each gradient whole, and have the optimizer use what it makes of it.

    The function must do the same on all ranks. Its random numbers are the same there, so that noise is too, and the
    generators of the ranks stay as they were. Under local SGD each replica has its own.

        edit_gradients(self, lambda name, gradient: gradient.mul_(0.1) if name.startswith("backbone.") else None)

    Args:
        module: as for `grad_norm`.
        edit: gets the name and the gradient, one after the other. It changes the gradient in place, or returns another.

    Raises:
        ConfigurationError: as for `full_gradients`.
    """
    found = _Gradients.of(module)
    with torch.no_grad(), found.same_random_numbers():
        for each in found.gradients:
            gradient = _unscaled(each)
            edited = edit(each.name, gradient)
            edited = gradient if edited is None else edited
            each.set_whole(edited if each.scale == 1 else edited * each.scale)


def scale_gradients(module: nn.Module, factor: float) -> None:
    """Multiply all gradients with a number. No rank needs another one for it.

    Args:
        module: as for `grad_norm`.
        factor: the number.

    Raises:
        ConfigurationError: as for `grad_norm`.
    """
    change_parts(_Gradients.of(module).gradients, lambda part, _: part * factor)


@dataclass(frozen=True)
class _Gradients:
    """The gradients of a module, and the ranks that have parts of them."""

    gradients: list[Gradient]  # in the order of the parameters
    device: torch.device  # of the parameters
    group: ProcessGroup | None  # ranks that have parts of the same gradients; None if each has whole ones
    stages: ProcessGroup | None  # ranks that have other parameters
    copied: bool  # whether other ranks make the same step

    @classmethod
    def of(cls, module: nn.Module) -> _Gradients:
        """Collect the gradients.

        Raises:
            ConfigurationError: they are not complete at this moment, or of a part of a pipeline's module.
        """
        trainer = trainer_of(module)
        _refuse_scaled(module)
        whole = module.module if is_wrapped(module) or isinstance(module, DistributedDataParallel) else module
        assert isinstance(whole, nn.Module)
        gradients, device = gradients_of(whole), next((each.device for each in whole.parameters()), torch.device("cpu"))
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        in_parts = any(type(each) is not Gradient for each in gradients)
        by_ddp = trainer is None or isinstance(trainer.strategy.model, DistributedDataParallel)
        summed = all(type(each) is MeshGradient for each in gradients)  # FSDP2 sums over ranks after each batch
        if trainer is not None and _accumulates(trainer) and (by_ddp or (in_parts and not summed)):
            raise ConfigurationError(_ACCUMULATING)
        stages = getattr(trainer.strategy, "stage_groups", None) if trainer is not None else None
        if stages is None and any(hasattr(each.parameter, "ds_pipe_replicated") for each in gradients):
            raise ConfigurationError(
                f"{type(module).__name__} is a part of a module whose other parts are in other stages of a pipeline. "
                "Give the LightningModule itself."
            )
        ranks, stages = stages or (dist.group.WORLD if several and in_parts else None, None)
        return cls(gradients, device, ranks, stages, copied=several and (in_parts or by_ddp))

    def norms(self, norm_type: float) -> Norms:
        """Compute the norms."""
        return Norms(self.gradients, norm_type, self.device, self.group, self.stages)

    @contextmanager
    def same_random_numbers(self) -> Iterator[None]:
        """Draw rank 0's random numbers on all ranks that make the same step."""
        if not self.copied:
            yield
            return
        seed = torch.randint(2**62, (1,)).to(self.device)
        dist.broadcast(seed, 0)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(int(seed))
            yield


def _accumulates(trainer: Trainer) -> bool:
    strategy = trainer.strategy  # ours may count otherwise than Lightning does
    return not strategy.ends_step() if isinstance(strategy, AveragesGradients) else accumulates(trainer)


_ACCUMULATING = (
    "The gradients of this batch are not complete: the optimizer waits for further batches "
    "(accumulate_grad_batches), and until the last of them each rank has its own. Look at them in "
    "on_before_optimizer_step()."
)


def _refuse_scaled(module: nn.Module) -> None:
    """Refuse gradients that a GradScaler may have multiplied."""
    scaler = getattr(precision_of(module), "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return
    # whether the scale has been taken off the gradients of a step that is not made yet
    unscaled = any(state["stage"].name == "UNSCALED" for state in scaler._per_optimizer_states.values())
    if not unscaled:
        raise ConfigurationError(
            "The gradients may be multiplied with the loss scale of precision='16-mixed' at this moment. Look at them "
            "in on_before_optimizer_step(); with Fabric, call "
            "fabric.strategy.precision.unscale_gradients(optimizer) before."
        )


def _unscaled(gradient: Gradient) -> Tensor:
    whole = gradient.whole()
    return whole if gradient.scale == 1 else whole / gradient.scale


def _checked(norm_type: float | str) -> float:
    p = float(norm_type)
    if not p > 0:
        raise ConfigurationError(f"norm_type={norm_type!r} is no norm. Give a positive number, or 'inf'.")
    return p
