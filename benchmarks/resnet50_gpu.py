"""How fast ResNet-50 trains on one GPU with our recipe, with stock Lightning and in a hand-written loop.

    python benchmarks/resnet50_gpu.py            # one NVIDIA GPU, at most eight minutes
    python benchmarks/resnet50_gpu.py --smoke    # tiny numbers, also on a CPU: does it run?

All three train the same network on one synthetic batch on the device, in bf16 and channels_last, compiled and not, with
the same optimizer and schedule. A window is one fit whose first steps do not count; the device is waited for only at
the window's two ends. The cases take turns. The recipe's progress bar is left out; its metrics are logged every 10
steps instead of 50, so that each window has its share of them. Results are written after each half, so that a run cut
short keeps the first.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

import torch
from harness import RESULTS, Spread, interleave, ratios, save, show, spread
from resnet50_windows import (
    DEVICE,
    Plan,
    Train,
    make_model,
    synchronize,
    train_by_hand,
    train_recipe,
    train_stock,
    window,
)
from torch._dynamo.utils import counters

BUDGET_S = 450.0  # of eight minutes; the rest is for imports and the last window
COMPILE_S = 150.0  # what compiling three networks may take; with less left they are not begun
SMOKE = Plan(batch_size=2, pixels=32, warmup=1, steps=2, network="small")
# Bytes that an image's activations move at 224 pixels in bf16 and NHWC, forward and backward. Eager: each convolution,
# BatchNorm, ReLU and addition reads and writes for itself; compiled: those after a convolution are one kernel.
TRAFFIC = {"eager": 464e6, "compiled": 335e6}
H200_BYTES_PER_S = 4.15e12  # what its memory is expected to sustain, of 4.8 TB/s in its data sheet

Window = Callable[[], tuple[float, float]]
Measured = dict[str, list[tuple[float, float]]]


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


def measure(windows: Mapping[str, Window], rounds: int, deadline: float) -> Measured:
    """Complete rounds of all windows in turns, after one that is thrown away, while there is time for another."""
    measured: Measured = {name: [] for name in windows}
    interleave(windows, rounds=1, warmup=0)
    longest = 0.0
    for turn in range(rounds):
        started = time.monotonic()
        if started + longest > deadline:
            break
        order = windows if turn % 2 else dict(reversed(windows.items()))
        for name, values in interleave(order, rounds=1, warmup=0).items():
            measured[name] += values
        longest = max(longest, time.monotonic() - started)
    return measured


def windows_of(trains: Mapping[str, Train], plan: Plan, compiled: bool) -> dict[str, Window]:
    """A window of each competitor, each with a model of its own, which stays compiled from one to the next."""
    return {name: partial(window, train, make_model(plan, compiled), plan) for name, train in trains.items()}


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


def bounds(mode: str, plan: Plan, copied: float) -> dict[str, float]:
    """Images per second that memory allows, at the bandwidth measured here and, on an H200, at the expected one."""
    bytes_per_image = TRAFFIC[mode] * (plan.pixels / 224) ** 2
    limits = {"measured copies": copied / bytes_per_image}
    if DEVICE.type == "cuda" and "H200" in torch.cuda.get_device_name():
        limits["4.15 TB/s"] = H200_BYTES_PER_S / bytes_per_image
    return limits


def figures(measured: Measured, limits: Mapping[str, float]) -> dict[str, Any]:
    """Rates, their ratios in the same round, memory, and the share of what the memory's bandwidth allows."""
    rates = {name: [rate for rate, _ in values] for name, values in measured.items()}
    medians = {name: spread(values) for name, values in rates.items()}
    return {
        "images_per_s": medians,
        "recipe_to_lightning": ratios(rates["recipe"], rates["lightning"]),
        "recipe_to_loop": ratios(rates["recipe"], rates["loop"]),
        "peak_memory_gib": {name: max(peak for _, peak in values) for name, values in measured.items()},
        "memory_bound_images_per_s": limits,
        "share_of_memory_bound": {
            name: {at: value.median / limit for at, limit in limits.items()} for name, value in medians.items()
        },
        "windows_images_per_s": rates,
    }


def half(
    trains: Mapping[str, Train], plan: Plan, mode: str, rounds: int, deadline: float, copied: float
) -> dict[str, Any]:
    """The figures of the eager or the compiled half, or why there are none."""
    if mode == "compiled" and time.monotonic() + COMPILE_S > deadline:
        return {"skipped": f"less than {COMPILE_S:.0f} s were left"}
    counters.clear()
    try:
        measured = measure(windows_of(trains, plan, mode == "compiled"), rounds, deadline)
    except Exception as error:  # whatever the compiler lacks here must not cost the other half its figures
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    if not all(measured.values()):
        return {"skipped": "the time was over after the warm-up"}
    found = figures(measured, bounds(mode, plan, copied))
    return {**found, "graphs_compiled": counters["stats"]["unique_graphs"]}


def rows(mode: str, found: Mapping[str, Any]) -> list[list[str]]:
    if "images_per_s" not in found:
        return [[mode, "all", *found.values(), ""]]
    rates: dict[str, Spread] = found["images_per_s"]
    return [
        [
            mode,
            name,
            rate.text(),
            ", ".join(f"{share:.0%} at {at}" for at, share in found["share_of_memory_bound"][name].items()),
        ]
        for name, rate in rates.items()
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6, help="windows of each case; fewer where the time is over")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds after which no window is begun")
    parser.add_argument("--no-mlflow", action="store_true", help="the recipe without its logger")
    parser.add_argument("--smoke", action="store_true", help="tiny numbers, on any device")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write resnet50_gpu.json into")
    options = parser.parse_args()
    if DEVICE.type != "cuda" and not options.smoke:
        parser.error("no CUDA device is visible; --smoke runs tiny numbers on the CPU")
    return options


def run(options: argparse.Namespace, started: float, folder: str) -> dict[str, Any]:
    plan = SMOKE if options.smoke else Plan()
    store, said = mlflow_store(options.no_mlflow, folder)
    trains: dict[str, Train] = {
        "loop": train_by_hand,
        "lightning": train_stock,
        "recipe": partial(train_recipe, store=store),
    }
    copied = copy_bytes_per_s(2**20 if options.smoke else 4 * 2**30)
    settings = {**asdict(plan), "smoke": options.smoke, "budget_s": options.budget, "mlflow_store": said}
    found: dict[str, Any] = {"copy_bytes_per_s": copied}
    for mode, share in (("eager", 0.45), ("compiled", 1.0)):
        found[mode] = half(trains, plan, mode, options.rounds, started + share * options.budget, copied)
        found["wall_s"] = time.monotonic() - started
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
    show("ResNet-50: median (quartiles)", ["mode", "case", "images/s", "of the memory bound"], table)
    if any("failed" in found[mode] for mode in ("eager", "compiled")):
        sys.exit(1)


if __name__ == "__main__":
    main()
