"""Is DDP faster as the tuner sets it, and how far is its pick from the best of all settings?

    sudo python benchmarks/tune_ddp.py                                 # links of 500 Mbit/s, of 2 Gbit/s, and none
    sudo python benchmarks/tune_ddp.py --bandwidth 1gbit --grid-at 1gbit

Two nodes in network namespaces train the network of `ddp_step.py`, one process with one thread each. For each link the
tuner searches three times: among lossless settings, with bf16 allowed, and among all. Then the default and the three
picks train in turns. For one of the links, all combinations of a grid are measured by a hand-written loop round torch's
DDP as well. The best of them, the pick and the default then run in turns in that loop: the least of 200 noisy figures
would be less than what its settings take.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import os
import random
import statistics
import time
import warnings
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import job_harness
import torch
import torch.distributed as dist
from ddp_step import BETWEEN_FITS, NETWORKS, TimedBatches, train_with_lightning
from harness import Spread, interleave, ratios, show, spread
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from azureml_strategy.strategies import AzureMLDDPStrategy
from azureml_strategy.strategies.compression import communication_hook, on_any_backend
from azureml_strategy.strategies.tuning.record import Tuning, read_tuning
from azureml_strategy.strategies.tuning.search import COMPRESSIONS, Settings, sizes_first_bucket

UNSHAPED = "none"
DEFAULT, LOSSLESS, BF16, ALL = "default", "tuned, lossless", "tuned, bf16 allowed", "tuned, all allowed"
REQUESTS: dict[str, dict[str, Any]] = {
    LOSSLESS: {},
    BF16: {"tune_lossy": "bf16"},
    ALL: {"tune_lossy": True, "tune_static_graph": True},
}
BUCKETS_MB = (5, 10, 25, 50, 75)  # and torch's default, and all gradients at once
FINALISTS = 5  # of the grid
EXACT_STEPS = 2  # before PowerSGD begins, in the hand-written loop
UNTIL_POWERSGD = 12  # in a training it begins after 10
# Of the pick among all over the default.
SPEEDUP_TARGETS = {"500mbit": 1.45, "2gbit": 1.10, UNSHAPED: 1.0}
BEST_TARGET = 1.03  # step with the pick to the best of the grid
SEARCH_TARGET = 0.10  # passes of the search to those of the grid


def batch_of(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    torch.manual_seed(int(os.environ["RANK"]))
    shape = (options.batch_size, 3, options.pixels, options.pixels)
    return torch.randn(shape), torch.randint(1000, shape[:1])


def network_of(options: argparse.Namespace) -> nn.Module:
    gc.collect()
    torch.manual_seed(0)
    return NETWORKS[options.network]()


def file_of(name: str) -> Path:
    """Both nodes see the folder that the job was started in."""
    return Path(f"{name.replace(', ', '_').replace(' ', '_')}.json").resolve()


def search(name: str, options: argparse.Namespace) -> Tuning:
    """Have the tuner search, in a training of one step."""
    path = file_of(name)
    strategy = AzureMLDDPStrategy(tune=True, tuned=path, **REQUESTS[name])
    train_with_lightning(network_of(options), TimedBatches(batch_of(options), 1), strategy=strategy)
    dist.barrier()
    return read_tuning(path)


def step_of_training(name: str, picks: Mapping[str, Settings], options: argparse.Namespace) -> float:
    """Seconds of a step of a training, from one request for a batch to the next."""
    settle = UNTIL_POWERSGD if picks[name].gradient_compression == "powersgd" else BETWEEN_FITS
    strategy = AzureMLDDPStrategy(tuned=None if name == DEFAULT else file_of(name))
    batches = TimedBatches(batch_of(options), settle + options.steps + 1)
    train_with_lightning(network_of(options), batches, strategy=strategy)
    return statistics.median(end - start for start, end in pairwise(batches.moments[settle:]))


def grid(gradient_bytes: int) -> list[Settings]:
    """All combinations of what the tuner may set, in an order of chance that all ranks draw alike."""
    sizes: list[float | None] = [None, *BUCKETS_MB, -(-gradient_bytes // 2**20)]
    buckets = [(size, None) for size in sizes]
    if sizes_first_bucket():
        buckets += [(size, 1.0) for size in sizes if size is not None]
    combined = [
        Settings(*bucket, static_graph=static, gradient_as_bucket_view=view, gradient_compression=compression)
        for bucket, static, view, compression in itertools.product(
            buckets, (False, True), (True, False), (None, *COMPRESSIONS)
        )
    ]
    random.Random(0).shuffle(combined)
    return combined


class HandWrittenLoop:
    """Forward and backward passes of a network under torch's DDP, with any settings.

    Attributes:
        passes: so far.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.network = network_of(options)
        self.images, self.labels = batch_of(options)
        self.steps = options.grid_steps
        self.passes = 0

    def step_s(self, settings: Settings) -> float:
        """Seconds of a step: the median of a few, each by the slower rank; on all ranks the same."""
        ddp = DistributedDataParallel(self.network, **settings.arguments())
        warmup = 2
        if settings.gradient_compression is not None:
            warmup = EXACT_STEPS + 1 if settings.gradient_compression == "powersgd" else warmup
            state, hook = communication_hook(settings.gradient_compression, settings.powersgd_rank, EXACT_STEPS)
            ddp.register_comm_hook(state, on_any_backend(hook))
        own = torch.tensor([self.one_step(ddp) for _ in range(warmup + self.steps)][warmup:])
        dist.all_reduce(own, dist.ReduceOp.MAX)
        del ddp.reducer, ddp.logger  # its hooks are on the parameters
        gc.collect()
        return float(own.median())

    def one_step(self, ddp: DistributedDataParallel) -> float:
        self.passes += 1
        ddp.zero_grad()
        dist.barrier()
        begun = time.perf_counter()
        nn.functional.cross_entropy(ddp(self.images), self.labels).backward()
        return time.perf_counter() - begun


def measure_grid(pick: Settings, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the whole grid, then the best of it, the pick and the default in turns."""
    loop = HandWrittenLoop(options)
    settings = grid(sum(each.nbytes for each in loop.network.parameters()))
    step_s = {each: loop.step_s(each) for each in settings[: options.grid_most]}
    passes = loop.passes
    finalists = dict.fromkeys([*sorted(step_s, key=step_s.__getitem__)[:FINALISTS], pick, Settings()])
    final = interleave({each.words(): partial(loop.step_s, each) for each in finalists}, options.rounds)
    return {
        "passes": passes,
        "step_s": {each.words(): seconds for each, seconds in step_s.items()},
        "final_step_s": final,
    }


def run_rank(options: argparse.Namespace) -> Any:
    """The searches, all rounds of trainings, and the grid, in one of the two processes."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    tunings = {name: search(name, options) for name in REQUESTS}
    picks = {DEFAULT: Settings(), **{name: tuning.pick for name, tuning in tunings.items()}}
    step_s = interleave({name: partial(step_of_training, name, picks, options) for name in picks}, options.rounds)
    found: dict[str, Any] = {
        "picks": {name: settings.words() for name, settings in picks.items()},
        "why": {name: tuning.why for name, tuning in tunings.items()},
        "passes": {name: tuning.steps for name, tuning in tunings.items()},
        "step_s": step_s,
    }
    if options.bandwidth == [options.grid_at]:
        found["grid"] = measure_grid(picks[ALL], options)
    dist.destroy_process_group()
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for link in options.bandwidth:
        one = argparse.Namespace(**{**vars(options), "bandwidth": [link]})
        shaped = None if link == UNSHAPED else link
        found[link] = job_harness.run_job(one, partial(figures, link=link), bandwidth=shaped)
    return found


def figures(measured: Mapping[str, Any], link: str) -> dict[str, Any]:
    """Steps of each pick beside the default in the same round; and of the pick beside the best of the grid."""
    step_s = measured["step_s"]
    speedup = {name: ratios(step_s[DEFAULT], values) for name, values in step_s.items()}
    same = {name: pick == measured["picks"][DEFAULT] for name, pick in measured["picks"].items()}
    wanted = SPEEDUP_TARGETS.get(link)
    found = {
        "picks": measured["picks"],
        "why": measured["why"],
        "passes": measured["passes"],
        "step_s": {name: spread(values) for name, values in step_s.items()},
        "speedup_over_default": speedup,
        "kept_the_default": same,
        "targets": {
            "speedup_of_all_at_least": wanted,
            "met": {
                "speedup": None if wanted is None else speedup[ALL].median >= wanted or (wanted <= 1 and same[ALL]),
                "lossless is never slower": same[LOSSLESS] or speedup[LOSSLESS].median >= 1,
            },
        },
        "rounds_step_s": step_s,
    }
    return found | ({"grid": figures_of_grid(measured)} if "grid" in measured else {})


def figures_of_grid(measured: Mapping[str, Any]) -> dict[str, Any]:
    found, pick = measured["grid"], measured["picks"][ALL]
    final = found["final_step_s"]
    best = min(final, key=lambda name: statistics.median(final[name]))
    to_best, share = ratios(final[pick], final[best]), measured["passes"][ALL] / found["passes"]
    ranked = sorted(found["step_s"].items(), key=lambda each: each[1])
    return {
        "settings": len(ranked),
        "passes": found["passes"],
        "share_of_passes_of_the_search": share,
        "best": best,
        "pick": pick,
        "pick_to_best": to_best,
        "final_step_s": {name: spread(values) for name, values in final.items()},
        "targets": {
            "pick_to_best_at_most": BEST_TARGET,
            "share_of_passes_at_most": SEARCH_TARGET,
            "met": {"pick": to_best.median <= BEST_TARGET, "passes": share <= SEARCH_TARGET},
        },
        "step_s": dict(ranked),
    }


def rows(link: str, measured: Mapping[str, Any]) -> list[list[str]]:
    if "skipped" in measured:
        return [[link, "skipped", measured["skipped"], "", ""]]
    speedup: Mapping[str, Spread] = measured["speedup_over_default"]
    return [
        [link, name, measured["picks"][name], step_s.text(1e3, digits=0), speedup[name].text(digits=2)]
        for name, step_s in measured["step_s"].items()
    ]


def parse() -> argparse.Namespace:
    parser = job_harness.parser(__doc__, "tune_ddp")
    parser.add_argument("--bandwidth", nargs="+", default=list(SPEEDUP_TARGETS), help=f"of the links, or {UNSHAPED}")
    parser.add_argument("--grid-at", default="2gbit", help="the link at which the grid is measured")
    parser.add_argument("--grid-steps", type=int, default=5, help="timed for each of its settings, after two or three")
    parser.add_argument("--grid-most", type=int, default=1000, help="of its settings to measure, for a trial")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="timed in each training")
    parser.add_argument("--network", choices=NETWORKS, default="resnet50")
    parser.add_argument("--batch-size", type=int, default=4, help="images a step and rank")
    parser.add_argument("--pixels", type=int, default=144, help="of an image's side: what a step computes")
    return parser.parse_args()


def main() -> None:
    found = job_harness.run("tune_ddp", parse(), run_rank, measure)
    if found is None:
        return
    columns = ["links", "case", "settings", "step, ms", "to default"]
    show("Two nodes: median (quartiles)", columns, [row for link in found for row in rows(link, found[link])])
    for link, each in found.items():
        if "grid" in each:
            steps: Mapping[str, Spread] = each["grid"]["final_step_s"]
            lines = [[name, step_s.text(1e3, digits=0)] for name, step_s in steps.items()]
            show(f"{link}: the best of {each['grid']['settings']} settings", ["settings", "step, ms"], lines)


if __name__ == "__main__":
    main()
