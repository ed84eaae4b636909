"""Trains situations under a strategy, in the processes of a job, and writes the weights and losses that they end with.

    python tests/situations/running.py OUTPUT LAYOUT[,LAYOUT...] [[LAYOUT/]SITUATION...]

`alone` is the layout of one process without a strategy: the oracle. A situation with a layout is of that one alone.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from tests.multiprocess.scripts.strategies import BUCKETS
from tests.situations import callbacks, layers, optimization
from tests.situations.modules import EPOCHS, Situation, loader
from torch import Tensor
from torch.distributed.tensor import DTensor

from azureml_strategy.strategies import (
    AzureMLDDPStrategy,
    AzureMLDeepSpeedStrategy,
    AzureMLLocalSGDStrategy,
    AzureMLModelParallelStrategy,
    PipelineStrategy,
)
from azureml_strategy.strategies.errors import ConfigurationError

ALONE = "alone"
WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
ACCELERATOR = os.environ.get("SITUATIONS_ACCELERATOR", "cpu")
LAYOUTS: dict[str, Callable[..., Strategy]] = {
    "ddp": AzureMLDDPStrategy,
    "zero_1": partial(AzureMLDeepSpeedStrategy, stage=1, **BUCKETS),
    "zero_2": partial(AzureMLDeepSpeedStrategy, stage=2, **BUCKETS),
    "zero_3": partial(AzureMLDeepSpeedStrategy, stage=3, **BUCKETS),
    "fsdp2": partial(AzureMLModelParallelStrategy, tensor_parallel_size=1),
    "tensor_parallel": partial(
        AzureMLModelParallelStrategy, tensor_parallel_size=min(WORLD, 2), tensor_parallel_across_nodes=True
    ),
    "pipeline": partial(PipelineStrategy, num_stages=WORLD, micro_batches=1, partition="uniform"),
    "local_sgd": partial(AzureMLLocalSGDStrategy, period=1),
}
SITUATIONS: dict[str, Situation] = {**optimization.SITUATIONS, **callbacks.SITUATIONS, **layers.SITUATIONS}
TOLERANCE = 1e-5
TIMEOUT = timedelta(seconds=30)  # a rank that waits for one that has failed


def train(layout: str, situation: Situation) -> dict[str, Any]:
    """What a situation came to under a layout: weights and losses, or the error and how many steps were before."""
    torch.manual_seed(0)
    module = situation.module()
    trainer: Trainer | None = None
    steps = 0
    try:
        for _ in range(situation.fits):
            trainer = make_trainer(layout, **situation.trainer())
            trainer.fit(module, loader(*replica(layout)))
            steps += trainer.global_step
    except Exception as error:  # each is to be judged, whatever another one does
        taken = steps + (trainer.global_step if trainer else 0)
        last = "".join(traceback.format_exception(error)[-6:])
        words = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        refused = isinstance(error, ConfigurationError)  # on all ranks together
        return {"error": words, "steps": taken, "trace": last, "refused": refused}
    assert trainer is not None
    loss = trainer.callback_metrics.get("loss")
    return {"weights": weights(layout, module), "loss": float(loss) if loss is not None else None, "steps": steps}


def replica(layout: str) -> tuple[int, int]:
    """Which of how many replicas this process belongs to."""
    size = {ALONE: WORLD, "pipeline": WORLD, "tensor_parallel": min(WORLD, 2)}.get(layout, 1)
    return RANK // size, WORLD // size


def make_trainer(layout: str, **arguments: Any) -> Trainer:
    alone = layout == ALONE
    one_device = "cuda:0" if ACCELERATOR == "cuda" else ACCELERATOR
    return Trainer(
        strategy=SingleDeviceStrategy(one_device) if alone else LAYOUTS[layout](**process_group()),
        accelerator=ACCELERATOR,
        devices=1,
        num_nodes=1 if alone else WORLD,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def process_group() -> dict[str, Any]:
    """Arguments of each strategy: several ranks share the one GPU, which only gloo allows."""
    return {"timeout": TIMEOUT, **({"process_group_backend": "gloo"} if ACCELERATOR == "cpu" or WORLD > 1 else {})}


def weights(layout: str, module: LightningModule) -> dict[str, list[float]]:
    """All parameters and float buffers whole; those of its stage under a pipeline."""
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: whole(tensor) for name, tensor in found.items() if tensor.is_floating_point() and not tensor.is_meta}


def whole(tensor: Tensor) -> list[float]:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().double().flatten().tolist()
    return tensor.detach().double().flatten().tolist()


def differences(found: Mapping[str, Any], oracle: Mapping[str, Any]) -> list[str]:
    """What differs from one process: names of weights with the largest distance, and the loss."""
    words = []
    for name, values in found["weights"].items():
        wanted = oracle["weights"].get(name)
        if wanted is None or len(wanted) != len(values):
            words.append(f"{name} has {len(values)} numbers, {0 if wanted is None else len(wanted)} on one process")
            continue
        largest = max((abs(a - b) / max(1.0, abs(b)) for a, b in zip(values, wanted, strict=True)), default=0.0)
        if not largest <= TOLERANCE:
            words.append(f"{name} differs by {largest:.2g}")
    if oracle["loss"] is not None and not math.isclose(found["loss"] or 0.0, oracle["loss"], rel_tol=1e-4):
        words.append(f"loss {found['loss']} instead of {oracle['loss']}")
    return words


def of_layout(layout: str, names: Iterable[str]) -> list[str]:
    """Those of the names that are for all layouts, `NAME`, or for this one, `LAYOUT/NAME`."""
    return [name for each in names if "/" not in (name := each.removeprefix(f"{layout}/"))]


def collect() -> None:
    """Free what a training has left, and have the next collections, DeepSpeed's own too, not visit all libraries."""
    gc.collect()
    gc.freeze()


def prepare() -> None:
    os.environ.setdefault("DS_ACCELERATOR", ACCELERATOR)
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def main() -> None:
    output, layouts, names = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:] or list(SITUATIONS)
    prepare()
    output.mkdir(parents=True, exist_ok=True)
    with (output / f"{RANK}.jsonl").open("a") as results:
        for layout in layouts:
            for name in of_layout(layout, names):
                print(f"{layout}/{name}", flush=True)
                result = train(layout, SITUATIONS[name])
                print(json.dumps([f"{layout}/{name}", result]), file=results, flush=True)
                if WORLD > 1 and result["steps"] and "error" in result and not result["refused"]:
                    return  # the ranks may be in different collectives, and nothing after it would mean anything
                collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
