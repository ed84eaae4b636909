"""Runs training loops of Fabric under a strategy, in the processes of a job, and writes the weights they end with.

    python tests/situations/fabric.py OUTPUT LAYOUT[,LAYOUT...] [[LAYOUT/]LOOP...]

`alone` is the layout of one process without a strategy: the oracle. A loop with a layout is of that one alone.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import Strategy
from tests.multiprocess.scripts.strategies import BUCKETS
from tests.situations.loops import LOOPS, Loop, batches
from tests.situations.refused_by_fabric import LEFT_OUT, REFUSED
from tests.situations.running import ACCELERATOR, ALONE, RANK, WORLD, collect, of_layout, prepare, process_group, whole

from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.fabric import (
    FabricDDPStrategy,
    FabricDeepSpeedStrategy,
    FabricModelParallelStrategy,
)

LAYOUTS: dict[str, Callable[..., Strategy]] = {
    "ddp": FabricDDPStrategy,
    "zero_1": partial(FabricDeepSpeedStrategy, stage=1, **BUCKETS),
    "zero_2": partial(FabricDeepSpeedStrategy, stage=2, **BUCKETS),
    "zero_3": partial(FabricDeepSpeedStrategy, stage=3, **BUCKETS),
    "fsdp2": partial(FabricModelParallelStrategy, tensor_parallel_size=1),
    "tensor_parallel": partial(
        FabricModelParallelStrategy, tensor_parallel_size=min(WORLD, 2), tensor_parallel_across_nodes=True
    ),
}


class CountsSteps:
    """A callback of Fabric's."""

    def __init__(self) -> None:
        self.steps = 0

    def on_after_optimizer_step(self, **_: Any) -> None:
        self.steps += 1


def train(layout: str, loop: Loop) -> dict[str, Any]:
    """What a loop came to under a layout: weights, or the error and how many steps were before."""
    torch.manual_seed(0)
    counts = CountsSteps()
    fabric = make_fabric(layout, counts)
    size = {ALONE: WORLD, "tensor_parallel": min(WORLD, 2)}.get(layout, 1)
    try:
        rows = [each.to(fabric.device) for each in batches(RANK // size, WORLD // size)]
        module = loop(fabric, rows)
        return {"weights": weights(module), "loss": None, "steps": counts.steps}
    except Exception as error:  # each is to be judged, whatever another one does
        last = "".join(traceback.format_exception(error)[-6:])
        words = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        refused = isinstance(error, ConfigurationError)  # on all ranks together
        return {"error": words, "steps": counts.steps, "trace": last, "refused": refused}


def make_fabric(layout: str, counts: CountsSteps) -> Fabric:
    alone = layout == ALONE
    fabric = Fabric(
        strategy="auto" if alone else LAYOUTS[layout](**process_group()),
        accelerator=ACCELERATOR,
        devices=1,
        num_nodes=1 if alone else WORLD,
        callbacks=[counts],
    )
    fabric.launch()
    return fabric


def weights(module: torch.nn.Module) -> dict[str, list[float]]:
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


def _is_told(layout: str, name: str, error: str) -> bool:
    """Whether an error is one that all ranks end with, in the same place."""
    words = REFUSED.get(layout, {}).get(name)
    return words is not None and words in error


def main() -> None:
    output, layouts, names = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:] or list(LOOPS)
    prepare()
    output.mkdir(parents=True, exist_ok=True)
    with (output / f"{RANK}.jsonl").open("a") as results:
        for layout in layouts:
            for name in [each for each in of_layout(layout, names) if each not in LEFT_OUT.get(layout, ())]:
                print(f"{layout}/{name}", flush=True)
                result = train(layout, LOOPS[name])
                print(json.dumps([f"{layout}/{name}", result]), file=results, flush=True)
                if (
                    WORLD > 1
                    and "error" in result
                    and not result["refused"]
                    and not _is_told(layout, name, result["error"])
                ):
                    return  # the ranks may be in different collectives, and nothing after it would mean anything
                collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
