"""What does a step of local SGD take behind slow links, beside DDP, torch's own local SGD, and computing alone?

    sudo python benchmarks/local_sgd_step.py                          # links of 500 and of 200 Mbit/s
    sudo python benchmarks/local_sgd_step.py --bandwidth 1gbit

Two nodes in network namespaces train the network of `ddp_step.py` on the same batch in all cases, in turns, inside one
pair of processes with one thread each. A window of `--steps` steps, one period or several, is timed between two equal
places of it, so that it has its exchanges in full; its time is divided by its steps. Not in it: the start of a fit, and
the average that the strategy takes once at the end of a fit. Bytes are what the node's interface has sent meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import job_harness
import torch
import torch.distributed as dist
from ddp_step import BETWEEN_FITS, NETWORKS, TimedBatches, optimizer, train_with_lightning
from harness import Spread, interleave, ratios, show, spread
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from azureml_strategy.strategies import AzureMLLocalSGDStrategy

PERIOD = 16
DDP, LOCAL_SGD, OVERLAPPED = "azureml_ddp", "azureml_local_sgd", "overlapped"
TORCH, ALONE = "PostLocalSGDOptimizer", "computing alone"
CASES = (DDP, LOCAL_SGD, OVERLAPPED, TORCH, ALONE)
# Of local SGD over DDP.
SPEEDUP_TARGETS = {"500mbit": 2.2, "200mbit": 4.0}
LIMIT_TARGET = 0.9  # of the speed of computing alone, overlapped
TORCH_TARGET = 1.0  # our step to torch's
BYTES_TARGET = 15  # DDP's bytes to ours


class CountedBatches(TimedBatches):
    """Timed batches, and what this node had sent when each was asked for.

    Args:
        batch: given again and again.
        steps: that count, after those at the start of a fit.
    """

    def __init__(self, batch: tuple[Tensor, Tensor], steps: int) -> None:
        super().__init__(batch, BETWEEN_FITS + steps + 1)
        self.counted = steps
        self.sent: list[int] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number, batch in enumerate(super().__iter__(), 1):
            self.sent.append(bytes_sent())
            yield batch
            if number == BETWEEN_FITS:
                dist.barrier()  # both ranks begin the window together

    def per_step(self) -> tuple[float, float]:
        """Seconds and bytes of a step: the mean over those that count."""
        seconds, sent = (values[-1] - values[BETWEEN_FITS] for values in (self.moments, self.sent))
        return seconds / self.counted, sent / self.counted


def bytes_sent(folder: Path = Path("/sys/class/net")) -> int:
    """What the interfaces of this node have sent, by the kernel's count, without loopback."""
    return sum(int((each / "statistics/tx_bytes").read_text()) for each in folder.iterdir() if each.name != "lo")


def train_alone(network: nn.Module, batches: TimedBatches, sgd: Any) -> None:
    """Train on the bare network by a hand-written loop, which communicates as far as the optimizer does."""
    for images, labels in batches:
        sgd.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        sgd.step()


def train(case: str, network: nn.Module, batches: TimedBatches) -> None:
    """One fit of a competitor."""
    if case == ALONE:
        train_alone(network, batches, optimizer(network))
    elif case == TORCH:
        averager = PeriodicModelAverager(period=PERIOD, warmup_steps=0)
        train_alone(network, batches, PostLocalSGDOptimizer(optimizer(network), averager))
    elif case == DDP:
        train_with_lightning(network, batches, strategy=DDP)
    else:
        overlap = {"fragments": PERIOD, "delay": 1} if case == OVERLAPPED else {}
        train_with_lightning(network, batches, strategy=AzureMLLocalSGDStrategy(period=PERIOD, **overlap))


def time_steps(case: str, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds and bytes of a step of one fit."""
    gc.collect()
    torch.manual_seed(int(os.environ["RANK"]))
    shape = (options.batch_size, 3, options.pixels, options.pixels)
    batch = torch.randn(shape), torch.randint(1000, shape[:1])
    batches = CountedBatches(batch, options.ddp_steps if case == DDP else options.steps)
    torch.manual_seed(0)
    train(case, NETWORKS[options.network](), batches)
    return batches.per_step()


def run_rank(options: argparse.Namespace) -> Any:
    """All rounds of all cases, in one of the two processes."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    measured = interleave({name: partial(time_steps, name, options) for name in options.cases}, options.rounds)
    dist.destroy_process_group()
    return measured


def measure(options: argparse.Namespace) -> dict[str, Any]:
    return {
        link: job_harness.run_job(options, partial(figures, link=link), bandwidth=link) for link in options.bandwidth
    }


def figures(measured: Mapping[str, Sequence[tuple[float, float]]], link: str) -> dict[str, Any]:
    """Steps of each case, compared within a round."""
    step_s = {name: [seconds for seconds, _ in rounds] for name, rounds in measured.items()}
    sent = {name: [count for _, count in rounds] for name, rounds in measured.items()}
    ours = [name for name in (LOCAL_SGD, OVERLAPPED) if name in step_s]
    speedup = against(DDP, step_s, step_s)
    limit = against(ALONE, step_s, step_s)
    to_torch = {name: ratios(step_s[name], step_s[TORCH]) for name in ours if TORCH in step_s}
    fewer = against(DDP, sent, [name for name in sent if name not in (DDP, ALONE)])
    return {
        "step_s": {name: spread(values) for name, values in step_s.items()},
        "speedup_over_ddp": speedup,
        "share_of_the_speed_of_computing_alone": limit,
        "ratio_to_torch": to_torch,
        "bytes_sent_per_step": {name: spread(values) for name, values in sent.items()},
        "ddp_bytes_to_those_of": fewer,
        "targets": targets(link, speedup, limit, to_torch, fewer),
        "rounds_step_s": step_s,
    }


def against(baseline: str, values: Mapping[str, Sequence[float]], names: Iterable[str]) -> dict[str, Spread]:
    """What the baseline takes, in multiples of what each case does; nothing if the baseline was left out."""
    return {name: ratios(values[baseline], values[name]) for name in names if baseline in values}


def targets(
    link: str,
    speedup: Mapping[str, Spread],
    limit: Mapping[str, Spread],
    to_torch: Mapping[str, Spread],
    fewer: Mapping[str, Spread],
) -> dict[str, Any]:
    """What was to be reached, and whether the medians do."""
    wanted = SPEEDUP_TARGETS.get(link)
    return {
        "speedup_of_local_sgd_at_least": wanted,
        "share_of_computing_alone_overlapped_at_least": LIMIT_TARGET,
        "ratio_to_torch_at_most": TORCH_TARGET,
        "ddp_bytes_to_local_sgd_at_least": BYTES_TARGET,
        "met": {
            "speedup": at_least(wanted, speedup, LOCAL_SGD),
            "overlapped": at_least(LIMIT_TARGET, limit, OVERLAPPED),
            "torch": to_torch[LOCAL_SGD].median <= TORCH_TARGET if LOCAL_SGD in to_torch else None,
            "bytes": at_least(BYTES_TARGET, fewer, LOCAL_SGD, OVERLAPPED),
        },
    }


def at_least(wanted: float | None, found: Mapping[str, Spread], *names: str) -> bool | None:
    """Whether the medians reach a target; None if there is none, or a case was left out."""
    if wanted is None or not set(names) <= found.keys():
        return None
    return all(found[name].median >= wanted for name in names)


def rows(link: str, measured: Mapping[str, Any]) -> list[list[str]]:
    if "skipped" in measured:
        return [[link, "skipped", measured["skipped"], "", "", ""]]
    compared = measured["speedup_over_ddp"], measured["share_of_the_speed_of_computing_alone"]
    return [
        [
            link,
            name,
            step_s.text(1e3, digits=0),
            *(each[name].text(digits=2) if name in each else "" for each in compared),
            f"{measured['bytes_sent_per_step'][name].median / 1e6:,.1f}",
        ]
        for name, step_s in measured["step_s"].items()
    ]


def parse() -> argparse.Namespace:
    parser = job_harness.parser(__doc__, "local_sgd_step")
    parser.add_argument("--bandwidth", nargs="+", default=list(SPEEDUP_TARGETS), help="of the links (Linux, root)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=PERIOD, help=f"timed in each fit, a multiple of {PERIOD}")
    parser.add_argument("--ddp-steps", type=int, default=4, help="the same for azureml_ddp, whose steps are all alike")
    parser.add_argument("--network", choices=NETWORKS, default="resnet50")
    parser.add_argument("--batch-size", type=int, default=4, help="images a step and rank")
    parser.add_argument("--pixels", type=int, default=144, help="of an image's side: what a step computes")
    options = parser.parse_args()
    if options.steps % PERIOD:
        parser.error(f"--steps={options.steps}: exchanges count in full in a multiple of {PERIOD}.")
    return options


def main() -> None:
    found = job_harness.run("local_sgd_step", parse(), run_rank, measure)
    if found is None:
        return
    columns = ["links", "case", "step, ms", "speed-up", "of computing alone", "MB a step"]
    show("Two nodes: median (quartiles)", columns, [row for link in found for row in rows(link, found[link])])


if __name__ == "__main__":
    main()
