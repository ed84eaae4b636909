"""Steps that the planner predicted before they were measured, on emulated nodes, with the naive model beside it.

    sudo python benchmarks/planned_steps.py

Nodes are network namespaces with links of a given rate, one process with one core's share on each. The planner is
calibrated on five settings at the slowest and the fastest rate. Then each further case is predicted: the processes
first measure a step without communication, rank 0 writes what it predicts of them, and only then they train.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import job_harness
import numpy as np
import torch
import torch.distributed as dist
from harness import interleave, show, spread
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from scipy.optimize import least_squares
from torch import Tensor

from azureml_strategy.models import GPTConfig, LanguageModel, ResNet50
from azureml_strategy.planning import MeasuredStep, Network, Prediction, network_of_module, predict
from azureml_strategy.planning.fitted import Parameters, TierDefaults, default_parameters
from azureml_strategy.planning.steps import Distribution
from azureml_strategy.strategies import AzureMLDDPStrategy, AzureMLModelParallelStrategy, PipelineStrategy

NAME = "planned_steps"
TARGETS = {"median": 0.03, "worst": 0.08}
FIRST_STEPS = 3  # of a fit, which do not count: buckets are rebuilt, shapes are sent, memory is taken
STAGES = 2
PULL = 0.02  # a factor of e between a number and the usual one weighs as much as an error of a fiftieth
SHAPE = ("images", "pixels", "sequences", "tokens", "layers", "width")  # options that say what is trained
CALIBRATED = (
    "ResNet-50, DDP",
    "ResNet-50, DDP, one bucket",
    "GPT, DDP",
    "GPT, FSDP2",
    "GPT, pipeline of 4 micro-batches",
)
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Setting:
    """How a network is trained: what runs, and how the planner is told."""

    network: str
    strategy: Callable[[], Strategy]
    how: Distribution = field(default_factory=Distribution)


def pipeline(micro_batches: int) -> Setting:
    def strategy() -> Strategy:
        return PipelineStrategy(num_stages=STAGES, micro_batches=micro_batches)

    return Setting("gpt", strategy, Distribution(strategy="pipeline", num_stages=STAGES, micro_batches=micro_batches))


SETTINGS = {
    "ResNet-50, DDP": Setting("resnet50", AzureMLDDPStrategy),
    "ResNet-50, DDP, one bucket": Setting(
        "resnet50",
        partial(AzureMLDDPStrategy, bucket_cap_mb=1000),
        Distribution(bucket_mib=1000, first_bucket_mib=1000),
    ),
    "ResNet-50, DDP, bf16": Setting(
        "resnet50", partial(AzureMLDDPStrategy, gradient_compression="bf16"), Distribution(gradient_bytes=2)
    ),
    "ResNet-50, DDP, 3 batches a step": Setting("resnet50", AzureMLDDPStrategy, Distribution(accumulate=3)),
    "GPT, DDP": Setting("gpt", AzureMLDDPStrategy),
    "GPT, FSDP2": Setting(
        "gpt", partial(AzureMLModelParallelStrategy, tensor_parallel_size=1), Distribution(strategy="model_parallel")
    ),
    "GPT, pipeline of 2 micro-batches": pipeline(2),
    "GPT, pipeline of 4 micro-batches": pipeline(4),
}


class TimedBatches:
    """One batch again and again, and the moments at which it was asked for."""

    def __init__(self, batch: Batch, steps: int) -> None:
        self.batch, self.steps = batch, steps
        self.moments: list[float] = []

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.steps):
            self.moments.append(time.perf_counter())
            yield self.batch

    def step_s(self, accumulate: int) -> list[float]:
        """Seconds of the optimizer steps that count."""
        return [end - start for start, end in pairwise(self.moments[FIRST_STEPS * accumulate :: accumulate])]


class Images(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = ResNet50()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4, momentum=0.9)


class Text(LanguageModel):
    """Nothing logged."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.pipeline_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


def module_of(network: str, options: argparse.Namespace) -> LightningModule:
    if network == "resnet50":
        return Images()
    width = options.width
    return Text(GPTConfig(512, options.tokens, options.layers, width, width // 64, 4 * width, mlp="gelu", tied=False))


def batch_of(network: str, options: argparse.Namespace) -> Batch:
    if network == "resnet50":
        shape = (options.images, 3, options.pixels, options.pixels)
        return torch.randn(shape), torch.randint(1000, shape[:1])
    tokens = torch.randint(512, (options.sequences, options.tokens + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(setting: Setting, steps: int, options: argparse.Namespace) -> list[float]:
    """Seconds of each step of one fit that counts."""
    gc.collect()
    accumulate = setting.how.accumulate
    batches = TimedBatches(batch_of(setting.network, options), accumulate * (steps + FIRST_STEPS) + 1)
    torch.manual_seed(0)
    Trainer(
        max_epochs=1,
        accelerator="cpu",
        strategy=setting.strategy(),
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module_of(setting.network, options), batches)
    return batches.step_s(accumulate)


def step_alone(network: str, options: argparse.Namespace) -> float:
    """Seconds of a step without communication, while the other ranks do the same."""
    gc.collect()
    torch.manual_seed(0)
    module, batch = module_of(network, options), batch_of(network, options)
    module.configure_model()
    optimizer, moments = module.configure_optimizers(), []
    dist.barrier()
    for _ in range(FIRST_STEPS + options.steps):
        moments.append(time.perf_counter())
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()
    moments.append(time.perf_counter())
    return statistics.median(end - start for start, end in pairwise(moments[FIRST_STEPS:]))


@cache
def described(network: str, shape: str) -> Network:
    """A network as the planner sees it; `shape` holds the options, as JSON."""
    options = argparse.Namespace(**json.loads(shape))
    with torch.device("meta"):
        module, batch = module_of(network, options), batch_of(network, options)
        module.configure_model()
    return network_of_module(module, batch, len(batch[0]), network)


@dataclass(frozen=True)
class Links:
    """What is fitted.

    Attributes:
        efficiency: share of a link's rate that carries gradients.
        copy_s_per_gb: seconds in which a process copies what it waits for: FSDP2's gathered and scattered rows.
        slowdown_s_per_gb: seconds of computation that it costs to send as much at the same time.
        latency_s: of a message.
        operator_s: seconds of an operator beside its work, on each micro-batch.
        skew: share of a step by which ranks differ.
    """

    efficiency: float
    copy_s_per_gb: float
    slowdown_s_per_gb: float
    latency_s: float
    operator_s: float
    skew: float

    def across_gb(self, rate: float, how: Distribution) -> float:
        """Bandwidth over a link of so many GB/s."""
        copied = self.copy_s_per_gb if how.strategy == "model_parallel" else 0.0
        return 1 / (1 / (self.efficiency * rate) + copied)

    def parameters(self, rate: float) -> Parameters:
        """The planner's parameters with these links."""
        slowdown = min(self.slowdown_s_per_gb * self.efficiency * rate, 0.9)
        known, tier = default_parameters(), TierDefaults(self.latency_s, 1.0, slowdown)
        efficiency = replace(known.efficiency, kernel_s=self.operator_s)
        tiers = {**known.tiers, "Ethernet": tier}
        return replace(known, tiers=tiers, links={}, skew=self.skew, efficiency=efficiency)


def rate_of(bandwidth: str) -> float:
    """GB/s of what `tc` is given, such as 250mbit."""
    number, unit = (float(bandwidth[:-4]), bandwidth[-4:])
    return number * {"mbit": 1e-3, "gbit": 1.0}[unit] / 8


def predicted(
    setting: Setting, alone_s: float, bandwidth: str, links: Links, options: argparse.Namespace
) -> Prediction:
    """A step of a setting over links of a rate, from the step of its network alone."""
    shape = {name: getattr(options, name) for name in SHAPE}
    network, rate = described(setting.network, json.dumps(shape)), rate_of(bandwidth)
    return predict(
        network,
        batch_size=options.images if setting.network == "resnet50" else options.sequences,
        nodes=options.nodes,
        gpus_per_node=1,
        precision="32-true",
        strategy=setting.how,
        optimizer="sgd" if setting.network == "resnet50" else "adam",
        interconnect="ethernet",
        across_gb=links.across_gb(rate, setting.how),
        library="gloo",
        measured=MeasuredStep(alone_s),
        parameters=links.parameters(rate),
    )


def fit(turns: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> Links:
    """The links with the least squares of relative errors over some measured turns."""

    def links_of(given: np.ndarray) -> Links:
        return Links(1 / (1 + math.exp(-given[0])), *np.exp(given[1:]))

    def residuals(given: np.ndarray) -> list[float]:
        known = fitted_turns(turns, links_of(given), options)
        errors = [math.log(each["predicted_s"] / statistics.median(each["steps_s"])) for each in known]
        return [*errors, *(PULL * (given - usual))]  # what the turns cannot tell stays where it was

    usual = np.array([3.0, *map(math.log, (1.0, 1.0, 1e-4, 2e-5, 0.01))])
    shifts = np.array([[0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, -2], [0, -1, -1, 0, -1, 2]])
    return links_of(min((least_squares(residuals, usual + each) for each in shifts), key=lambda found: found.cost).x)


def run_rank(options: argparse.Namespace) -> Any:
    """All turns of all settings of one job, in one of its processes."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    train(Setting("gpt", AzureMLDDPStrategy), 1, options)  # starts the processes' group
    turns = interleave(
        {name: partial(take_turn, SETTINGS[name], options) for name in options.settings}, options.rounds, warmup=0
    )
    dist.destroy_process_group()
    return turns


def take_turn(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Time a step without communication, predict a step of the setting from it, and only then train."""
    alone_s = step_alone(setting.network, options)
    turn: dict[str, Any] = {"alone_s": alone_s}
    if options.links:
        found = predicted(setting, alone_s, options.bandwidth, Links(**json.loads(options.links)), options)
        turn |= {"predicted_s": found.step_s, "naive_s": naive_s(found), "predicted_at": time.time()}
    dist.barrier()
    turn |= {"trained_at": time.time(), "steps_s": train(setting, options.steps, options)}
    return turn


def naive_s(found: Prediction) -> float:
    """The step by the model without overlap, whose rate a prediction holds."""
    return found.step_s * found.samples_per_second / found.naive


def run_job(
    options: argparse.Namespace, nodes: int, bandwidth: str, settings: Sequence[str], links: Links | None
) -> list[dict[str, Any]]:
    """The turns of one job, one row each."""
    asked = {"nodes": nodes, "settings": list(settings), "links": json.dumps(asdict(links)) if links else None}
    job = argparse.Namespace(**{**vars(options), **asked})
    found = job_harness.run_job(job, lambda turns: turns, nodes, bandwidth)
    if "skipped" in found:
        raise SystemExit(found["skipped"])
    case = {"nodes": nodes, "bandwidth": bandwidth}
    return [{"setting": name, **case, **turn} for name, turns in found.items() for turn in turns]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Calibrate on a few cases, then predict and measure all others."""
    calibrated = [name for name in CALIBRATED if name in options.settings]
    ends = (options.rates[0], options.rates[-1])
    known = [turn for rate in dict.fromkeys(ends) for turn in run_job(options, STAGES, rate, calibrated, None)]
    links = fit(known, options)
    turns, more = [], []
    for rate in options.rates:
        left = [name for name in options.settings if rate not in ends or name not in calibrated]
        turns += run_job(options, STAGES, rate, left, links)
    for rate in options.more_nodes_at:
        more += run_job(options, 2 * STAGES, rate, options.settings, links)
    found = {"links": asdict(links), "calibration": cases_of(fitted_turns(known, links, options)), **judged(turns)}
    # Four nodes share two cores, so that what one waits for speeds the others up: of that the planner knows nothing.
    return found | ({"more_nodes": judged(more)} if more else {})


def fitted_turns(turns: Sequence[Mapping[str, Any]], links: Links, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The turns that calibrated, as the calibrated planner says them."""
    found = []
    for turn in turns:
        step = predicted(SETTINGS[turn["setting"]], turn["alone_s"], turn["bandwidth"], links, options)
        found.append({**turn, "predicted_s": step.step_s, "naive_s": naive_s(step)})
    return found


def cases_of(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The median over the turns of each case."""
    cases: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for turn in turns:
        cases.setdefault((turn["setting"], turn["nodes"], turn["bandwidth"]), []).append(turn)
    return [case_of(name, several) for name, several in cases.items()]


def case_of(name: tuple[str, int, str], turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of a case's turns; its error is the median of theirs."""
    seconds = [statistics.median(each["steps_s"]) for each in turns]

    def error(kind: str) -> float:
        return statistics.median(each[kind] / step - 1 for each, step in zip(turns, seconds, strict=True))

    return {
        **dict(zip(("setting", "nodes", "bandwidth"), name, strict=True)),
        **{kind: statistics.median(each[kind] for each in turns) for kind in ("alone_s", "predicted_s", "naive_s")},
        "measured_s": spread(seconds),
        "error": error("predicted_s"),
        "naive_error": error("naive_s"),
    }


def judged(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The cases that did not calibrate, and how far the predictions are from them."""
    cases = cases_of(turns)
    summary = {}
    for kind in ("error", "naive_error"):
        sizes = [abs(each[kind]) for each in cases]
        summary[kind] = {"median": statistics.median(sizes), "worst": max(sizes)}
    error = summary["error"]
    target = {**TARGETS, "met": all(error[name] <= most for name, most in TARGETS.items())}
    return {"cases": cases, "summary": summary, "target": target, "turns": list(turns)}


def parse() -> argparse.Namespace:
    parser = job_harness.parser(__doc__, NAME)
    parser.add_argument("--rates", nargs="+", default=["250mbit", "500mbit", "1gbit", "2gbit", "4gbit"])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--more-nodes-at", nargs="*", default=["1gbit"], help="rates at which four nodes train too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed in each fit")
    parser.add_argument("--images", type=int, default=4, help="of a ResNet-50's batch")
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=4, help="of a GPT's batch")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--nodes", type=int, default=STAGES, help=argparse.SUPPRESS)
    for name in ("--bandwidth", "--links"):  # as --nodes, of the job that a process belongs to
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    found = job_harness.run(NAME, parse(), run_rank, measure)
    if found is None:
        return
    columns = ["setting", "nodes", "link", "measured, ms", "predicted", "error", "naive"]
    rows = [
        [
            each["setting"],
            str(each["nodes"]),
            each["bandwidth"],
            each["measured_s"].text(1e3, 0),
            f"{1e3 * each['predicted_s']:,.0f}",
            f"{each['error']:+.1%}",
            f"{each['naive_error']:+.1%}",
        ]
        for each in [*found["cases"], *found.get("more_nodes", {"cases": []})["cases"]]
    ]
    show("Steps, predicted before they were measured", columns, rows)
    error = found["summary"]["error"]
    print(f"On two nodes: median error {error['median']:.1%}, worst {error['worst']:.1%}.")


if __name__ == "__main__":
    main()
