"""What a step of `azureml_ddp` takes beside Lightning's `ddp` and beside torch's DDP in a hand-written loop.

    python benchmarks/ddp_step.py                             # two ranks over loopback
    sudo python benchmarks/ddp_step.py --bandwidth 1gbit      # and over links of that rate, with compressed gradients

Both ranks of an emulated job of two nodes train the same network on the same batch in all cases, in turns, inside one
pair of processes. A step lasts from one request for a batch to the next, on rank 0; the loop that asks is each
competitor's own. Ours runs as in a job, with the two callbacks that it adds there; stock Lightning without them.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import job_harness
import torch
import torch.distributed as dist
from harness import Spread, interleave, ratios, show, spread
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from azureml_strategy.cluster.environ import CALLBACKS_SWITCH
from azureml_strategy.models import Bottleneck, ResNet50
from azureml_strategy.strategies import AzureMLDDPStrategy

TARGET = 1.01  # ours to Lightning's
CASES = ("torch", "lightning", "azureml_ddp")
COMPRESSED = "azureml_ddp, bf16"
BETWEEN_FITS = 2  # steps at the start of a fit that do not count: DDP rebuilds its buckets after the first


class SmallResNet(nn.Module):
    """Two bottlenecks and a classifier, for a smoke test."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Bottleneck(3, 8, 2), Bottleneck(32, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(32, 1000)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.blocks(images))


NETWORKS = {"resnet50": ResNet50, "small": SmallResNet}


class TimedBatches:
    """One batch again and again, and the moments at which it was asked for."""

    def __init__(self, batch: tuple[Tensor, Tensor], steps: int) -> None:
        self.batch = batch
        self.steps = steps
        self.moments: list[float] = []

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.steps):
            self.moments.append(time.perf_counter())
            yield self.batch

    def step_s(self) -> float:
        """The median of the steps that count."""
        moments = self.moments[BETWEEN_FITS:]
        return statistics.median(end - start for start, end in pairwise(moments))


class Classifier(LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self.network)


def optimizer(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)


def train_by_hand(network: nn.Module, batches: TimedBatches) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    module, sgd = DistributedDataParallel(network, gradient_as_bucket_view=True), optimizer(network)
    for images, labels in batches:
        sgd.zero_grad()
        nn.functional.cross_entropy(module(images), labels).backward()
        sgd.step()


def train_with_lightning(network: nn.Module, batches: TimedBatches, **arguments: Any) -> None:
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    trainer.fit(Classifier(network), batches)


@contextmanager
def without_our_callbacks() -> Iterator[None]:
    """Lightning as it is where this package is not installed: it loads our callbacks by an entry point."""
    os.environ[CALLBACKS_SWITCH] = "off"
    yield
    del os.environ[CALLBACKS_SWITCH]


def train(case: str, network: nn.Module, batches: TimedBatches) -> None:
    """One fit of a competitor."""
    if case == "torch":
        train_by_hand(network, batches)
    elif case == "lightning":
        with without_our_callbacks():
            train_with_lightning(network, batches, strategy="ddp", num_nodes=2, devices=1)
    else:
        strategy: str | Strategy = case
        if case == COMPRESSED:
            strategy = AzureMLDDPStrategy(gradient_compression="bf16")
        train_with_lightning(network, batches, strategy=strategy)


def time_steps(case: str, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a step of one fit, and the sum of the trained parameters, which shows that all train alike."""
    gc.collect()
    torch.manual_seed(int(os.environ["RANK"]))
    shape = (options.batch_size, 3, options.pixels, options.pixels)
    batches = TimedBatches((torch.randn(shape), torch.randint(1000, shape[:1])), options.steps + BETWEEN_FITS + 1)
    torch.manual_seed(0)
    network = NETWORKS[options.network]()
    train(case, network, batches)
    return batches.step_s(), sum(float(parameter.detach().double().sum()) for parameter in network.parameters())


def run_rank(options: argparse.Namespace) -> Any:
    """All rounds of all cases, in one of the two processes."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    names = (*CASES, COMPRESSED) if options.bandwidth else CASES
    measured = interleave({name: partial(time_steps, name, options) for name in names}, options.rounds)
    dist.destroy_process_group()
    return measured


def measure(options: argparse.Namespace) -> dict[str, Any]:
    plain = argparse.Namespace(**{**vars(options), "bandwidth": None})
    measured = {"loopback": job_harness.run_job(plain, figures)}
    if options.bandwidth:
        measured[options.bandwidth] = job_harness.run_job(options, figures, bandwidth=options.bandwidth)
    return measured


def figures(measured: Mapping[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Step times of each case, and each against Lightning's in the same round."""
    step_s = {name: [seconds for seconds, _ in rounds] for name, rounds in measured.items()}
    against_lightning = {name: ratios(values, step_s["lightning"]) for name, values in step_s.items()}
    return {
        "step_s": {name: spread(values) for name, values in step_s.items()},
        "ratio_to_lightning": against_lightning,
        "target": {"azureml_ddp_at_most": TARGET, "met": against_lightning["azureml_ddp"].median <= TARGET},
        "rounds_step_s": step_s,
        "trained_parameter_sum": {name: rounds[-1][1] for name, rounds in measured.items()},
    }


def rows(links: str, measured: Mapping[str, Any]) -> list[list[str]]:
    if "skipped" in measured:
        return [[links, "skipped", measured["skipped"], ""]]
    step_s: dict[str, Spread] = measured["step_s"]
    ratio: dict[str, Spread] = measured["ratio_to_lightning"]
    return [[links, name, step_s[name].text(1e3), ratio[name].text(digits=3)] for name in step_s]


def parse() -> argparse.Namespace:
    parser = job_harness.parser(__doc__, "ddp_step")
    parser.add_argument("--rounds", type=int, default=16, help="even, so that each order comes as often")
    parser.add_argument("--steps", type=int, default=10, help="timed in each fit")
    parser.add_argument("--network", choices=NETWORKS, default="resnet50")
    parser.add_argument("--batch-size", type=int, default=4, help="images a step and rank")
    parser.add_argument("--pixels", type=int, default=32)
    parser.add_argument("--bandwidth", help="measure over links of this rate too, such as 1gbit (Linux, root)")
    return parser.parse_args()


def main() -> None:
    found = job_harness.run("ddp_step", parse(), run_rank, measure)
    if found is None:
        return
    columns = ["links", "case", "step, ms", "to Lightning's"]
    show("Two ranks: median (quartiles)", columns, [row for links in found for row in rows(links, found[links])])


if __name__ == "__main__":
    main()
