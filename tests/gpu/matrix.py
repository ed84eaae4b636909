"""Each strategy with each precision and each kind of module: which cells there are, and what each of them trains to.

    python tests/gpu/matrix.py OUTPUT [--accelerator cuda] [--layouts zero_1 fsdp2 ...]

Every process of a job runs this. All cells of a call are in one process; each is a fit of a few steps by the Trainer.
`tests/gpu/agreement.py` compares what they trained to.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from tests.gpu.cells import MODELS, STEPS, Cell, batches

from azureml_strategy.strategies import (
    AzureMLDDPStrategy,
    AzureMLDeepSpeedStrategy,
    AzureMLModelParallelStrategy,
    PipelineStrategy,
)

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
TIMEOUT = timedelta(seconds=60)  # a rank that waits for one that has failed
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
_OF_CPUS = PRECISIONS[:3]  # there Lightning makes bf16-mixed of 16-mixed
ORACLE = "lightning_ddp"
Results = Mapping[str, Any]
# The scale of gradients in float16. With the usual 65,536 some would overflow, and DeepSpeed steps over more of the
# first steps than torch does.
_SCALE_POWER = 8
_ZERO = partial(AzureMLDeepSpeedStrategy, initial_scale_power=_SCALE_POWER)
# BatchNorm computes with a micro-batch, so that more of them would train to other numbers by right.
LAYOUTS: dict[str, Callable[..., Strategy]] = {
    ORACLE: DDPStrategy,
    "azureml_ddp": AzureMLDDPStrategy,
    "zero_1": partial(_ZERO, stage=1),
    "zero_2": partial(_ZERO, stage=2),
    "zero_3": partial(_ZERO, stage=3),
    "zero_3_offload": partial(_ZERO, stage=3, offload_optimizer=True, offload_parameters=True),
    "fsdp2": AzureMLModelParallelStrategy,
    "fsdp2_recomputing": partial(AzureMLModelParallelStrategy, activation_checkpointing=True),
    "pipeline": partial(PipelineStrategy, num_stages=WORLD, micro_batches=1),
}
_VARIANTS = ("zero_2", "zero_3_offload", "fsdp2_recomputing")  # another one stands for each
# Cells that cannot be, and who says so.
REFUSED = {
    ("fsdp2", "16-mixed"): "Lightning scales no gradients for FSDP2",
    ("fsdp2_recomputing", "16-mixed"): "Lightning scales no gradients for FSDP2",
    ("pipeline", "16-mixed"): "no float16 in a pipeline",
}
Cells = list[tuple[str, str, str]]


def cells(layouts: Sequence[str], accelerator: str, few: bool = False) -> Cells:
    """Layout, precision and model of each cell.

    Args:
        layouts: of `LAYOUTS`.
        accelerator: of the Trainer.
        few: see `_is_among_few`.
    """
    precisions = _OF_CPUS if accelerator == "cpu" else PRECISIONS
    return [
        (layout, precision, model)
        for layout, precision in product(layouts, precisions)
        for model in (MODELS[:1] if (layout, precision) in REFUSED else MODELS)
        if not few or _is_among_few(layout, precision, model)
    ]


def _is_among_few(layout: str, precision: str, model: str) -> bool:
    """Whether a cell is among those that meet any two of layout, precision and model once.

    Compiling costs most, under ZeRO-3 as much as all else, and is there with bf16-mixed alone.
    """
    if layout in _VARIANTS:
        return False
    if model == "compiled":
        return precision == "bf16-mixed" and layout != "zero_3"
    turn = [*LAYOUTS].index(layout) + MODELS.index(model)
    return layout == ORACLE or precision == _OF_CPUS[turn % len(_OF_CPUS)]


def read(folder: Path, world: int) -> list[Results]:
    """What each rank has written of the cells, by `LAYOUT/PRECISION/MODEL`."""
    files = [folder / f"{rank}.jsonl" for rank in range(world)]
    return [dict(map(json.loads, file.read_text().splitlines())) if file.is_file() else {} for file in files]


def left(chosen: Cells, ranks: Sequence[Results]) -> Cells:
    """The cells that have neither failed on a rank nor ended on all."""
    return [
        cell
        for cell in chosen
        for found in [[rank.get("/".join(cell), {}) for rank in ranks]]
        if not (all(found) or any("error" in each for each in found))
    ]


def run_cell(layout: str, precision: str, model: str, accelerator: str) -> dict[str, Any]:
    """Train one; what it came to, or its error and how many steps there were before."""
    module, started = Cell(model, "inductor" if accelerator == "cuda" else "eager"), time.monotonic()
    try:
        trainer = _fit(module, layout, precision, accelerator)
    except Exception as error:  # every cell is to be judged, whatever another one does
        last = traceback.format_exception(error)[-8:]
        return {"error": f"{type(error).__name__}: {error}", "steps": len(module.losses), "trace": "".join(last)}
    return {
        "losses": [float(loss) for loss in module.losses],
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "buffers": module.float_buffers(),
        "seconds": round(time.monotonic() - started, 3),
    }


def _fit(module: Cell, layout: str, precision: str, accelerator: str) -> Trainer:
    trainer = make_trainer(layout, precision, accelerator, max_steps=STEPS, limit_val_batches=1)
    loader = batches(module.model, 1 if layout == "pipeline" else WORLD)
    trainer.fit(module, loader, loader)
    return trainer


def make_trainer(
    layout: str, precision: str, accelerator: str, further: Mapping[str, Any] | None = None, **arguments: Any
) -> Trainer:
    """A quiet Trainer of this job, with further arguments of its strategy. Two ranks on one GPU need gloo."""
    backend = "nccl" if accelerator == "cuda" and WORLD == 1 else "gloo"
    if precision == "16-mixed" and "ddp" in layout:
        scaler = torch.amp.GradScaler(accelerator, init_scale=2.0**_SCALE_POWER)
        arguments["plugins"] = MixedPrecision("16-mixed", accelerator, scaler)
    else:
        arguments["precision"] = precision
    return Trainer(
        strategy=LAYOUTS[layout](process_group_backend=backend, timeout=TIMEOUT, **(further or {})),
        accelerator=accelerator,
        devices=1,
        num_nodes=WORLD,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **arguments,
    )


def run(chosen: Cells, accelerator: str, file: Path) -> bool:
    """Run the cells in this process and write each as it ends; whether all were run.

    Where one of several ranks fails, it ends: the others wait for it and must be started anew.
    """
    for cell in chosen:
        torch._dynamo.reset()
        gc.collect()  # what is frozen is never freed
        gc.freeze()  # DeepSpeed collects garbage in each start, which would visit all libraries again and again
        result = run_cell(*cell, accelerator)
        with file.open("a") as lines:
            lines.write(json.dumps(["/".join(cell), result]) + "\n")
        if "error" in result and WORLD > 1:
            return False
    return True


def parse(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("output", type=Path, help="folder for a file of each rank; its cells are not run again")
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--few", action="store_true", help="those that differ most")
    return parser.parse_args()


def prepare() -> None:
    """Be quiet, exact and quick."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.backends.cudnn.allow_tf32 = False  # float32 is to be float32
    import_module("deepspeed")


def main() -> None:
    options = parse(__doc__)
    prepare()
    options.output.mkdir(parents=True, exist_ok=True)
    chosen = left(cells(options.layouts, options.accelerator, options.few), read(options.output, WORLD))
    complete = run(chosen, options.accelerator, options.output / f"{os.environ.get('RANK', 0)}.jsonl")
    if not complete:
        os._exit(1)  # the other ranks are not here to end the group with
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
