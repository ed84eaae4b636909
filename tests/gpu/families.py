"""Tiny models of transformers under each strategy, read by `load_pretrained`, against torch alone.

python tests/gpu/families.py OUTPUT [--accelerator cuda] [--layouts zero_1 fsdp2 ...]
"""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tests.gpu.matrix import make_trainer, parse, prepare
from tests.multiprocess.scripts.families import Module, alone, make_model

FAMILIES = ("llama", "qwen3", "gpt2", "bert")
STEPS = 4
# Of the float32 losses of a CPU and a GPU, relative.
TOLERANCE = 1e-4
ORACLE = "torch"
# transformers has no causal cut of it.
REFUSED = {("pipeline", "bert")}


def train(layout: str, family: str, folder: Path, accelerator: str) -> dict[str, Any]:
    """The losses under one strategy, or the error."""
    module = Module(family, STEPS, folder, accumulated=1)
    try:
        make_trainer(layout, "32-true", accelerator, max_steps=STEPS, limit_val_batches=0).fit(module)
    except Exception as error:  # each is to be judged, whatever another one does
        last = "".join(traceback.format_exception(error)[-8:])
        return {"error": f"{type(error).__name__}: {error}", "steps": len(module.losses), "trace": last}
    return {"losses": module.losses}


def main() -> None:
    options = parse(__doc__)
    prepare()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            make_model(family).save_pretrained(Path(folder) / family)
            results[f"{ORACLE}/32-true/{family}"] = {"losses": alone(family, STEPS, accumulated=1, clip=None)}
        for layout in options.layouts:
            for family in FAMILIES:
                result = train(layout, family, Path(folder) / family, options.accelerator)
                results[f"{layout}/32-true/{family}"] = result
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(results))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
