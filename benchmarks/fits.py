"""Fits of one model by our recipe and by stock Lightning, each with a loop by hand beside it, and what they came to."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from ddp_step import without_our_callbacks
from harness import Spread, spread
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from turns import DEVICE, Found, Plan, Step, Turns

from azureml_strategy.strategies import AzureMLDDPStrategy

LOOP = "loop"  # the peer that all fits have beside them
# What was measured, by the name of the fit; a sentence where there is nothing.
Measured = dict[str, Found | str]


@dataclass(frozen=True)
class Case:
    """One fit.

    Attributes:
        strategy: makes it.
        is_ours: whether it is the recipe, with our callbacks; stock Lightning otherwise.
        compiled: whether stock Lightning's network is compiled in place.
        model: further arguments of the model.
        within: what holds while it runs.
    """

    strategy: Callable[[], Strategy]
    is_ours: bool = True
    compiled: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)
    within: Callable[[], AbstractContextManager[object]] = nullcontext


def recipe(**strategy: Any) -> Case:
    """Our recipe under DDP."""
    return Case(partial(AzureMLDDPStrategy, **strategy))


def stock(compiled: bool, **how: Any) -> Case:
    """Stock Lightning, whose DDP is what ours is on one GPU."""
    return Case(DDPStrategy, is_ours=False, compiled=compiled, **how)


def graphs_uncut() -> AbstractContextManager[object]:
    """torch cuts a graph where a bucket of DDP's ends, on a single GPU as well. `AzureMLDDPStrategy` does not there."""
    return torch._dynamo.config.patch(optimize_ddp=False)


def fit(case: Case, module: LightningModule, turns: Turns, **arguments: Any) -> None:
    """Train a module in bf16, without what is not of the training itself."""
    with case.within(), nullcontext() if case.is_ours else without_our_callbacks():
        trainer = Trainer(
            strategy=case.strategy(),
            max_epochs=1,
            accelerator="gpu" if DEVICE.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed",
            limit_val_batches=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"logger": False, **arguments},
        )
        trainer.fit(module, turns)


def measure(
    fits: Mapping[str, Callable[[Turns], object]],
    batches: Sequence[Any],
    loop: Step,
    plan: Plan,
    deadline: float,
    needs_s: float = 0.0,
) -> Iterator[Measured]:
    """Run one fit after the other, each with the loop beside it; yield all figures after each.

    Args:
        fits: by their names.
        batches: are given again and again.
        loop: its step.
        plan: how many steps.
        deadline: on the monotonic clock; no turn begins after it.
        needs_s: what a fit may take before its first turn; with less left it is not begun.
    """
    measured = Measured()
    for name, run in fits.items():
        gc.collect()
        turns = Turns(name, batches, {LOOP: loop}, plan, deadline)
        try:
            if time.monotonic() + needs_s > deadline:
                measured[name] = f"skipped: less than {needs_s:.0f} s were left"
            else:
                run(turns)
                measured[name] = turns.found if turns.found.step_s else "skipped: the time was over"
        except Exception as error:  # whatever the compiler lacks here must not cost the others their figures
            traceback.print_exc()
            measured[name] = f"failed: {type(error).__name__}: {error}".splitlines()[0]
        yield measured


def figures(measured: Measured, unit: str, amount: int) -> dict[str, Any]:
    """Rates, their ratios in the same round, and memory.

    Args:
        measured: each with the loop beside it.
        unit: what is counted, such as images.
        amount: of it in a step.
    """
    found = {name: each for name, each in measured.items() if isinstance(each, Found)}
    rates = {name: [amount / step_s for step_s in each.step_s[name]] for name, each in found.items()}
    rates[LOOP] = [amount / step_s for each in found.values() for step_s in each.step_s[LOOP]]
    medians = {name: spread(values) for name, values in rates.items() if values}
    to_loop = {name: each.speeds(name, LOOP) for name, each in found.items()}
    return {
        f"{unit}_per_s": medians,
        "step_s": {name: amount / rate.median for name, rate in medians.items()},
        "to_loop": {name: spread(values) for name, values in to_loop.items()},
        **{f"recipe_to_{name}": each for name, each in recipe_to(to_loop).items()},
        "first_step_s": {name: each.first_s[name] for name, each in found.items()},
        "peak_memory_gib": {name: each.peak_gib.get(name, 0.0) for name, each in found.items()},
        f"turns_{unit}_per_s": rates,
        "left_out": {name: each for name, each in measured.items() if isinstance(each, str)},
    }


def recipe_to(to_loop: Mapping[str, list[float]]) -> dict[str, Spread]:
    """The recipe's speed relative to the loop and to stock Lightning, each of which had the loop beside it."""
    if not {"recipe", "lightning"} <= to_loop.keys():
        return {}
    pairs = zip(to_loop["recipe"], to_loop["lightning"], strict=False)  # the last round may have been too late for one
    return {"loop": spread(to_loop["recipe"]), "lightning": spread([ours / theirs for ours, theirs in pairs])}


def targets(found: Mapping[str, Any], unit: str, to_loop: float, rate: float) -> dict[str, Any]:
    """What the recipe must reach, and whether it does; empty where it was not measured."""
    if "recipe" not in found["to_loop"]:
        return {}
    reached = {"to_loop": found["to_loop"]["recipe"].median, f"{unit}_per_s": found[f"{unit}_per_s"]["recipe"].median}
    least = {"to_loop": to_loop, f"{unit}_per_s": rate}
    return {"at_least": least, "met": {name: reached[name] >= value for name, value in least.items()}}


def has_failed(*parts: Mapping[str, Any]) -> bool:
    """Whether a case of a part ended with an error."""
    return any(words.startswith("failed") for part in parts for words in part["left_out"].values())
