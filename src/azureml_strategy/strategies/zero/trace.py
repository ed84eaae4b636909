"""Has ZeRO-3 follow a whole step, also where `training_step` calls its module again, as `self(batch)` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def trace_whole_steps(engine: DeepSpeedEngine) -> None:
    """Let an engine of ZeRO-3 begin a step where its module is called, and not again where the module calls itself.

    DeepSpeed records the order in which a step uses the layers, gathers their parameters ahead in the next steps, and
    begins a step at each call of the module. Lightning calls the module to run `training_step` inside of it. A step
    with `self(batch)` calls it once more, so that DeepSpeed took one step for two. Its record never held: nothing was
    gathered ahead, and each step compared the order on all ranks anew, by six broadcasts for which the host waits.

    An engine of another stage is left as it is.
    """
    offload: Any = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    if hasattr(offload, "fwd_pre_hook"):
        offload.fwd_pre_hook.remove()
        offload.fwd_pre_hook = _OuterCalls(offload)


class _OuterCalls:
    """Resets the record at each call of a module from outside, in place of DeepSpeed's own hook."""

    def __init__(self, offload: Any) -> None:
        self._offload = offload
        self._depth = 0
        module: nn.Module = offload.module
        self._handles = (
            # First, as DeepSpeed's hook was: those of the layers go by the record.
            module.register_forward_pre_hook(self._before, prepend=True),
            module.register_forward_hook(self._after, always_call=True),
        )

    def remove(self) -> None:
        """Take the hooks off the module: DeepSpeed calls this, as it would its own hook's."""
        for each in self._handles:
            each.remove()

    def _before(self, *_: Any) -> None:
        if self._depth == 0:
            self._offload.get_param_coordinator().reset_step()
        self._depth += 1

    def _after(self, *_: Any) -> None:
        self._depth -= 1
