"""Hooks that compress the gradients of DDP."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeGuard

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from azureml_strategy.strategies.errors import ConfigurationError

Compression = Literal["bf16", "fp16", "powersgd"]
Hook = Callable[..., Any]
_HALF_HOOKS: dict[str, Hook] = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
# PowerSGD starts with exact all-reduces, so that momentum and the layout of buckets settle. DDP rebuilds its buckets
# after the first step, and PowerSGD keeps its errors per bucket, so torch accepts no less than 2.
_POWERSGD_EXACT_STEPS = 10


def on_any_backend(hook: Hook) -> Hook:
    """Wrap a hook so that torch accepts it on every backend, and it works there.

    torch refuses hooks named bf16_compress_* unless it finds NCCL, and checks only the name. gloo sums bfloat16 too,
    and so does every NCCL that torch 2.6 and later ships.

    PowerSGD sends a second time when the first has arrived. On a CPU it does so on gloo's threads. With several buckets
    under way, the ranks would call collectives in unequal orders and wait for ever. So there each bucket is finished
    before the next begins.
    """

    def hook_on_any_backend(state: Any, bucket: Any) -> Any:
        sent = hook(state, bucket)
        if isinstance(state, PowerSGDState) and bucket.buffer().device.type == "cpu":
            sent.wait()
        return sent

    hook_on_any_backend.__annotations__.clear()  # torch would compare them, and here they are strings
    hook_on_any_backend.__qualname__ = hook.__qualname__  # for Lightning's log
    return hook_on_any_backend


def communication_hook(
    compression: str, rank: int = 1, exact_steps: int = _POWERSGD_EXACT_STEPS, group: dist.ProcessGroup | None = None
) -> tuple[object | None, Hook]:
    """Return the state and the hook to register with DistributedDataParallel.

    Args:
        compression: `bf16` or `fp16` halves the bytes; `powersgd` sends low-rank factors and adds the error
            of each step to the gradient of the next (Vogels et al. 2019, https://arxiv.org/abs/1905.13727).
        rank: rank of PowerSGD's factors.
        exact_steps: steps before PowerSGD begins, 2 or more.
        group: that gradients are sent over; None for the process group of all ranks.

    Raises:
        ConfigurationError: the name is not one of the three, or the rank is below 1.
    """
    if compression in _HALF_HOOKS:
        return group, _HALF_HOOKS[compression]
    if compression != "powersgd":
        raise ConfigurationError(
            f"gradient_compression={compression!r} is unknown. Choose 'bf16', 'fp16' or 'powersgd'."
        )
    if rank < 1:
        raise ConfigurationError(
            f"powersgd_rank={rank} gives matrices without columns. Use 1 or more; 1 to 4 are usual."
        )
    return PowerSGDState(group, rank, exact_steps, use_error_feedback=True, warm_start=True), powerSGD_hook


def was_used(state: object | None) -> TypeGuard[PowerSGDState]:
    """Whether a state is PowerSGD's, and has sent gradients."""
    return isinstance(state, PowerSGDState) and state.iter > 0


def for_other_buckets(state: object | None) -> object | None:
    """Return the state of a hook for other buckets: a new one for PowerSGD, otherwise the same.

    PowerSGD keeps errors and factors by the numbers of buckets, and begins with exact steps while these settle.
    """
    if not isinstance(state, PowerSGDState):
        return state
    # Its arguments are its attributes, except `random_seed`, of which it has made `rng`.
    names = inspect.signature(PowerSGDState).parameters
    other = PowerSGDState(**{name: getattr(state, name) for name in names if hasattr(state, name)})
    other.rng = state.rng
    return other


def warn_of_used(state: object | None) -> None:
    """Warn of a state of PowerSGD from another training, which the user has kept in a file or in memory."""
    if was_used(state):
        rank_zero_warn(
            f"The PowerSGDState of ddp_comm_state has sent the gradients of {state.iter:,} steps. It keeps errors and "
            "factors by the numbers of buckets, which another training fills otherwise, so that they are left out: "
            f"this one begins without errors, and with {state.start_powerSGD_iter} exact steps. Give a new "
            "PowerSGDState, which does the same."
        )


def report_lost_errors(state: object | None, step: int) -> None:
    """Report that PowerSGD goes on from a step without the errors of the steps before."""
    if step > 0 and isinstance(state, PowerSGDState):
        rank_zero_info(
            f"PowerSGD goes on from step {step:,} without what the ranks had not sent, which is in no checkpoint, and "
            f"with {state.start_powerSGD_iter} exact steps: not as without a break."
        )
