"""What a step of `azureml_deepspeed_pipeline` takes beside DeepSpeed's engine in a hand-written loop, and its bubble.

    python benchmarks/pipeline_step.py

Two ranks of an emulated job of two nodes are the two stages of the same GPT, cut at the same layer, with the same
micro-batches, in turns, inside one pair of processes. A step lasts from one batch to the next, on rank 0. By hand the
batch comes in micro-batches already. Both stages have as many blocks. The bubble is what `pipeline/bubble` says, beside
(p - 1) / (m + p - 1).
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import job_harness
import torch
import torch.distributed as dist
from harness import interleave, ratios, show, spread
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from azureml_strategy.models import GPTConfig, LanguageModel
from azureml_strategy.strategies import PipelineStrategy
from azureml_strategy.strategies.pipeline import pipeline_bubble

TARGET = 1.03  # ours to DeepSpeed's
BUBBLE_POINTS = 0.05  # most that the measured bubble may differ from the formula
STAGES = 2
FIRST_STEPS = 3  # of a fit, which do not count: shapes are sent and memory is taken
TOKENS = 256

Batch = tuple[Tensor, Tensor]


class PlainGPT(LanguageModel):
    """The same optimizer in both cases, and nothing logged, as by hand."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.pipeline_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self)


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

    def step_s(self) -> float:
        return statistics.median(end - start for start, end in pairwise(self.moments[FIRST_STEPS:]))


class Bubbles(Callback):
    """The bubble of each step that counts."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx >= FIRST_STEPS:
            self.shares.append(float(trainer.callback_metrics["pipeline/bubble"]))


def optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-4)


def model(options: argparse.Namespace) -> PlainGPT:
    network = GPTConfig(TOKENS, options.tokens, options.layers, options.width, 8, 3 * options.width, tied=False)
    return PlainGPT(network)


def batch(options: argparse.Namespace, micro_batches: int) -> Batch:
    shape = (options.micro_batch_size * micro_batches, options.tokens + 1)
    tokens = torch.randint(TOKENS, shape, generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train_by_hand(options: argparse.Namespace, batches: TimedBatches) -> None:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    module = model(options)
    layers = [layer.build() for layer in module.pipeline_layers()]
    stage = PipelineModule(layers, num_stages=STAGES, loss_fn=module.pipeline_loss, partition_method="type:Block")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": options.micro_batches,
        "steps_per_print": None,
    }
    engine, *_ = deepspeed.initialize(
        args=Namespace(device_rank=0), model=stage, optimizer=optimizer(stage), config=config, dist_init_required=False
    )
    for inputs, targets in batches:
        pieces = zip(inputs.split(options.micro_batch_size), targets.split(options.micro_batch_size), strict=True)
        engine.train_batch(iter(pieces))


def train_with_trainer(
    options: argparse.Namespace, batches: TimedBatches, micro_batches: int, *callbacks: Callback
) -> None:
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        strategy=PipelineStrategy(num_stages=STAGES, micro_batches=micro_batches, partition="type:block"),
        callbacks=list(callbacks),
        log_every_n_steps=1 if callbacks else 1000,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model(options), batches)


def time_steps(case: str, options: argparse.Namespace) -> float:
    """Seconds of a step of one fit."""
    gc.collect()
    batches = TimedBatches(batch(options, options.micro_batches), options.steps + FIRST_STEPS + 1)
    if case == "deepspeed":
        train_by_hand(options, batches)
    else:
        train_with_trainer(options, batches, options.micro_batches)
    return batches.step_s()


def measure_bubble(options: argparse.Namespace, micro_batches: int) -> float:
    """The median over the steps of one fit."""
    gc.collect()
    bubbles, steps = Bubbles(), options.steps + FIRST_STEPS
    train_with_trainer(options, TimedBatches(batch(options, micro_batches), steps), micro_batches, bubbles)
    return statistics.median(bubbles.shares)


def run_rank(options: argparse.Namespace) -> Any:
    """All rounds of all cases, in one of the two processes."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    cases = ("azureml_deepspeed_pipeline", "deepspeed")  # ours first: it starts the processes' group
    step_s = interleave({name: partial(time_steps, name, options) for name in cases}, options.rounds)
    bubbles = {count: partial(measure_bubble, options, count) for count in options.bubbles}
    measured = {"step_s": step_s, "bubble": interleave(bubbles, max(options.rounds // 2, 1))}
    dist.destroy_process_group()
    return measured


def measure(options: argparse.Namespace) -> dict[str, Any]:
    return job_harness.run_job(options, figures, nodes=STAGES)


def figures(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Step times, ours against DeepSpeed's in the same round, and bubbles against the formula."""
    step_s = measured["step_s"]
    ratio = ratios(step_s["azureml_deepspeed_pipeline"], step_s["deepspeed"])
    bubbles = {int(count): spread(shares) for count, shares in measured["bubble"].items()}
    formula = {count: pipeline_bubble(STAGES, count) for count in bubbles}
    return {
        "step_s": {name: spread(values) for name, values in step_s.items()},
        "ratio_to_deepspeed": ratio,
        "bubble": bubbles,
        "bubble_formula": formula,
        "target": {
            "ratio_at_most": TARGET,
            "ratio_met": ratio.median <= TARGET,
            "bubble_within": BUBBLE_POINTS,
            "bubble_met": all(abs(bubbles[count].median - formula[count]) <= BUBBLE_POINTS for count in bubbles),
        },
        "rounds_step_s": step_s,
    }


def parse() -> argparse.Namespace:
    parser = job_harness.parser(__doc__, "pipeline_step")
    parser.add_argument("--rounds", type=int, default=8, help="even, so that each order comes as often")
    parser.add_argument("--steps", type=int, default=10, help="timed in each fit")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--micro-batch-size", type=int, default=4, help="sequences")
    parser.add_argument("--bubbles", type=int, nargs="+", default=[2, 4, 8, 16], help="numbers of micro-batches")
    return parser.parse_args()


def main() -> None:
    measured = job_harness.run("pipeline_step", parse(), run_rank, measure)
    if measured is None:
        return
    steps = [[case, each.text(1e3)] for case, each in measured["step_s"].items()]
    steps.append(["ours to DeepSpeed's", measured["ratio_to_deepspeed"].text(digits=3)])
    show("Two stages: median (quartiles)", ["case", "step, ms"], steps)
    rows = [
        [str(count), each.text(digits=3), f"{measured['bubble_formula'][count]:.3f}"]
        for count, each in measured["bubble"].items()
    ]
    show("Bubble", ["micro-batches", "measured", "(p-1)/(m+p-1)"], rows)


if __name__ == "__main__":
    main()
