"""Every script by name, the strategies that can train it, and why others cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.faults.scripts import averaging, data, metrics, optimization, schedules
from tests.faults.scripts.common import Training, with_resumable_loader

DDP, ZERO = "ddp", "zero2"


@dataclass(frozen=True)
class Script:
    """One kind of training script.

    Attributes:
        make: what it trains; called in the process that trains it.
        not_zero: why ZeRO cannot train it; empty where it can.
        not_together: why several ranks cannot, under any strategy.
        impossible: why it cannot be resumed exactly: then it must say so once when training begins, instead.
        may_go_on: whether a higher `max_epochs`, after the end, gives what it would have given from the beginning.
        batches: after so many batches an attempt of `chain.py` ends: above what a checkpoint and a half need.
    """

    make: Callable[[], Training]
    not_zero: str = ""
    not_together: str = ""
    impossible: str = ""
    may_go_on: bool = False
    batches: int = 5

    def jobs(self) -> list[tuple[str, int]]:
        """Strategies and ranks that can train it."""
        possible = [(DDP, 1), (DDP, 2), (ZERO, 2)]
        return [
            job for job in possible if not (job[1] > 1 and self.not_together) and not (job[0] == ZERO and self.not_zero)
        ]


_AVERAGE = "Lightning's callback puts the average into a state dict that DeepSpeed does not write"
_SWA = "Lightning refuses StochasticWeightAveraging under DeepSpeed"
_MANUAL = "two optimizers: DeepSpeed takes one"
_CLOSURES = "DeepSpeed's optimizers take no closure"
_WRITES = "the optimizer's own float32 copy of the weights overwrites what a hook writes to them"
_SCHEDULE = "Lightning refuses other accumulations than the Trainer's under DeepSpeed"
_FROZEN = "DeepSpeed takes no further parameter group when training has begun"
_REDUCED = "parameters that are frozen when DDP is set up are never reduced: ranks drift apart, resumed or not"
_WORKERS = "what a worker draws depends on all that it drew in the epochs before, and its state cannot be asked for"

_BEGINS_WITHIN = "its workers begin within an epoch, with other random numbers"

SCRIPTS: dict[str, Script] = {
    "plain": Script(data.plain, may_go_on=True),
    "reloaded": Script(data.reloaded),
    "augmentation": Script(data.augmentation),
    "worker_augmentation": Script(data.worker_augmentation),
    "persistent_workers": Script(data.persistent_workers, impossible=_WORKERS),
    "iterable_stateful": Script(data.iterable_stateful),
    "iterable_stateful_sized": Script(data.iterable_stateful_sized),
    "iterable_plain": Script(data.iterable_plain),
    "iterable_plain_sized": Script(data.iterable_plain_sized),
    "two_resumable_loaders": Script(data.two_resumable_loaders),
    "two_plain_loaders": Script(data.two_plain_loaders),
    "two_loaders_min_size": Script(data.two_loaders_min_size),
    "ema_callback": Script(averaging.ema_callback, _AVERAGE, may_go_on=True),
    "ema_own_callback": Script(averaging.ema_own_callback, may_go_on=True),
    "ema_module": Script(averaging.ema_module, _WRITES),
    "swa": Script(averaging.swa, _SWA),
    "swa_batch_norm": Script(averaging.swa_batch_norm, _SWA),
    "target_network": Script(averaging.target_network, may_go_on=True),
    "clamp_batch_end": Script(averaging.clamp_batch_end, _WRITES),
    "clamp_zero_grad": Script(averaging.clamp_zero_grad, _WRITES),
    "lookahead": Script(averaging.lookahead, _WRITES),
    "pruning": Script(averaging.pruning, _WRITES),
    "gan": Script(optimization.gan, _MANUAL),
    "lbfgs": Script(optimization.lbfgs, _CLOSURES),
    "compiled": Script(optimization.compiled),
    "accumulation": Script(optimization.accumulation, batches=9),
    "accumulation_schedule": Script(optimization.accumulation_schedule, _SCHEDULE, batches=13),
    "finetuning": Script(optimization.finetuning, _FROZEN, _REDUCED),
    "onecycle": Script(schedules.onecycle),
    "plateau_epoch": Script(schedules.plateau_epoch),
    "plateau_step": Script(schedules.plateau_step),
    "epoch_schedule": Script(schedules.epoch_schedule),
    "mid_epoch_validation": Script(schedules.mid_epoch_validation),
    "validation_across_epochs": Script(schedules.validation_across_epochs),
    "early_stopping": Script(schedules.early_stopping),
    "early_stopping_inside": Script(schedules.early_stopping_inside),
    "max_steps": Script(schedules.max_steps),
    "max_steps_at_epoch_end": Script(schedules.max_steps_at_epoch_end),
    "no_validation": Script(schedules.no_validation),
    "fixed_limits": Script(schedules.fixed_limits),
    "metrics": Script(metrics.metrics),
    "epoch_means": Script(metrics.epoch_means),
    "epoch_means_validated_within": Script(metrics.epoch_means_validated_within),
    "own_state": Script(metrics.own_state),
}

# Those that say themselves how they read, and what cannot be told from another script then.
_OWN_DATA = [
    *("plain", "reloaded", "persistent_workers", "iterable_stateful", "iterable_stateful_sized", "iterable_plain"),
    *("iterable_plain_sized", "two_resumable_loaders", "two_plain_loaders", "two_loaders_min_size"),
]


def _resumable(script: Script) -> Script:
    return replace(script, make=lambda: with_resumable_loader(script.make()))


# With our loader in place of a plain one.
SCRIPTS |= {
    "resumable": _resumable(SCRIPTS["plain"]),
    **{f"{name}+resumable": _resumable(script) for name, script in SCRIPTS.items() if name not in _OWN_DATA},
}
SCRIPTS["worker_augmentation+resumable"] = replace(SCRIPTS["worker_augmentation+resumable"], impossible=_BEGINS_WITHIN)
