"""How fast ResNet-50 trains on one GPU with our recipe, with stock Lightning and in a hand-written loop.

    python benchmarks/resnet50_gpu.py            # one NVIDIA GPU, at most four minutes
    python benchmarks/resnet50_gpu.py --smoke    # tiny numbers, also on a CPU: does it run?

All train the same network on one synthetic batch on the device, in bf16 and channels_last, with the same optimizer and
schedule. In each fit, stock Lightning's or ours, the loop by hand takes its turns between those of the fit. The device
is waited for only at the ends of a turn. The recipe's progress bar is left out; its metrics are logged every 10 steps
instead of 50, so that each turn has its share of them. What the compiled recipe gains by each of its parts is told by a
fit without it, a line each. Results are written after each fit, so that a run cut short keeps what it has.

Targets on an H100: the compiled recipe at least 0.99 of the loop by hand, and at least 5,700 images a second.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

import torch
from fits import Measured, figures, has_failed, measure, targets
from harness import RESULTS, Spread, save, show
from resnet50_cases import COMPILED, EAGER, HandWritten, Size, make_batch, make_model, train
from torch._dynamo.utils import counters
from turns import DEVICE, Plan, synchronize

BUDGET_S = 200.0  # `gpt_gpu.py` has the rest of eight minutes
COMPILE_S = 45.0  # what compiling a network may take; with less left no further one is begun
TARGETS = 0.99, 5700.0  # of the loop, and images a second
SMOKE = Size(batch_size=2, pixels=32, network="small")
# Bytes that an image's activations move at 224 pixels in bf16 and NHWC, forward and backward. Eager: each convolution,
# BatchNorm, ReLU and addition reads and writes for itself; compiled: those after a convolution are one kernel.
TRAFFIC = {"eager": 464e6, "compiled": 335e6}
H200_BYTES_PER_S = 4.15e12  # what its memory is expected to sustain, of 4.8 TB/s in its data sheet


def mlflow_store(no_mlflow: bool, folder: str) -> tuple[str | None, str]:
    """Where the recipe logs to, and what to say about it; None where it cannot."""
    if no_mlflow:
        return None, "none: --no-mlflow"
    if find_spec("mlflow") is None:
        return None, "none: mlflow is not installed"
    if find_spec("sqlalchemy") and find_spec("alembic"):
        return f"sqlite:///{folder}/mlflow.db", "sqlite"
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # all that mlflow-skinny brings along
    return f"file:{folder}/mlruns", "files, because mlflow-skinny has no SQLAlchemy"


def copy_bytes_per_s(size: int, repeats: int = 20) -> float:
    """Bytes read and written a second by copies on the device; the best of five, as nothing makes them faster."""
    source, target = (torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    times = []
    for _ in range(6):
        synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            target.copy_(source)
        synchronize()
        times.append(time.perf_counter() - start)
    return 2 * size * repeats / min(times[1:])


def bounds(mode: str, size: Size, copied: float) -> dict[str, float]:
    """Images per second that memory allows, at the bandwidth measured here and, on an H200, at the expected one."""
    bytes_per_image = TRAFFIC[mode] * (size.pixels / 224) ** 2
    limits = {"measured copies": copied / bytes_per_image}
    if DEVICE.type == "cuda" and "H200" in torch.cuda.get_device_name():
        limits["4.15 TB/s"] = H200_BYTES_PER_S / bytes_per_image
    return limits


def memory_bound(rates: Mapping[str, Spread], limits: Mapping[str, float]) -> dict[str, Any]:
    """The share of what the memory's bandwidth allows."""
    shares = {name: {at: rate.median / limit for at, limit in limits.items()} for name, rate in rates.items()}
    return {"memory_bound_images_per_s": limits, "share_of_memory_bound": shares}


def size_of(options: argparse.Namespace) -> Size:
    return SMOKE if options.smoke else Size()


def rows(mode: str, found: Mapping[str, Any]) -> list[list[str]]:
    rates: dict[str, Spread] = found["images_per_s"]
    table = []
    for name, rate in rates.items():
        to_loop = found["to_loop"][name].text(digits=3) if name in found["to_loop"] else ""
        shares = (f"{share:.0%} at {at}" for at, share in found["share_of_memory_bound"][name].items())
        table.append([mode, name, rate.text(digits=0), to_loop, ", ".join(shares)])
    return table + [[mode, name, words, "", ""] for name, words in found["left_out"].items()]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6, help="turns of each case; fewer where the time is over")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds after which no turn is begun")
    parser.add_argument("--no-mlflow", action="store_true", help="the recipe without its logger")
    parser.add_argument("--smoke", action="store_true", help="tiny numbers, on any device")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write resnet50_gpu.json into")
    options = parser.parse_args()
    if DEVICE.type != "cuda" and not options.smoke:
        parser.error("no CUDA device is visible; --smoke runs tiny numbers on the CPU")
    if options.smoke:
        options.budget = 3600.0  # nobody knows how slow a CPU is
    return options


def part(mode: str, options: argparse.Namespace, store: str | None, deadline: float) -> Iterator[Measured]:
    """All fits of the eager or the compiled half."""
    size, plan = size_of(options), Plan(2, 1, options.rounds) if options.smoke else Plan(10, 15, options.rounds)
    cases, compiled = {"eager": EAGER, "compiled": COMPILED}[mode], mode == "compiled"
    fits = {name: partial(train, case, size, store) for name, case in cases.items()}
    loop = HandWritten(make_model(size), compiled, len(fits) * len(plan))
    return measure(fits, [make_batch(size)], loop.step, plan, deadline, COMPILE_S if compiled else 0.0)


def run(options: argparse.Namespace, started: float, folder: str) -> dict[str, Any]:
    store, said = mlflow_store(options.no_mlflow, folder)
    size = size_of(options)
    copied = copy_bytes_per_s(2**20 if options.smoke else 4 * 2**30)
    settings = {**asdict(size), "smoke": options.smoke, "budget_s": options.budget, "mlflow_store": said}
    found: dict[str, Any] = {"copy_bytes_per_s": copied}
    for mode, share in (("eager", 0.3), ("compiled", 1.0)):
        counters.clear()
        for measured in part(mode, options, store, started + share * options.budget):
            found[mode] = figures(measured, "images", size.batch_size)
            found[mode] |= memory_bound(found[mode]["images_per_s"], bounds(mode, size, copied))
            found[mode]["graphs_compiled"] = counters["stats"]["unique_graphs"]
            found["wall_s"] = time.monotonic() - started
            found["targets"] = targets(found[mode], "images", *TARGETS)
            save("resnet50_gpu", settings, found, options.results)
    return found


def main() -> None:
    started = time.monotonic()
    options = parse()
    options.results = options.results.resolve()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_float32_matmul_precision("high")  # as the recipe
    torch.backends.cudnn.benchmark = True
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found = run(options, started, folder)
    table = [row for mode in ("eager", "compiled") for row in rows(mode, found[mode])]
    columns = ["mode", "case", "images/s", "of the loop", "of the memory bound"]
    show("ResNet-50: median (quartiles)", columns, table)
    if has_failed(found["eager"], found["compiled"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
