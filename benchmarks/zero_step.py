"""What a step of `azureml_deepspeed` takes beside Lightning's DeepSpeedStrategy.

    python benchmarks/zero_step.py               # stage 2, two ranks over loopback
    python benchmarks/zero_step.py --stage 3

Both ranks of an emulated job of two nodes train the same GPT on the same batch in both cases, in turns, inside one pair
of processes. Lightning's strategy refuses CPUs; here it runs with the few lines that ours has for them, and nothing
else of ours.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import warnings
from functools import partial
from typing import Any

import job_harness
import torch
import torch.distributed as dist
from ddp_step import BETWEEN_FITS, TimedBatches, without_our_callbacks
from harness import interleave, ratios, show, spread
from lightning.pytorch import Trainer

from azureml_strategy.models import GPTConfig, LanguageModel
from azureml_strategy.strategies import AzureMLDeepSpeedStrategy
from azureml_strategy.strategies.zero.device import AnyDeviceDeepSpeedStrategy

TARGET = 1.01  # ours to Lightning's
CASES = ("lightning", "azureml_deepspeed")
TOKENS = 256


def model(options: argparse.Namespace) -> LanguageModel:
    network = GPTConfig(
        vocab_size=TOKENS,
        context=options.length,
        layers=options.layers,
        width=options.width,
        heads=4,
        mlp_width=4 * options.width,
    )
    return LanguageModel(network)


def train(case: str, module: LanguageModel, batches: TimedBatches, stage: int) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    arguments: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 1, "enable_model_summary": False, **quiet}
    if case == "lightning":
        with without_our_callbacks():
            strategy = AnyDeviceDeepSpeedStrategy(stage=stage)
            Trainer(strategy=strategy, num_nodes=2, devices=1, **arguments).fit(module, batches)
    else:
        Trainer(strategy=AzureMLDeepSpeedStrategy(stage=stage), **arguments).fit(module, batches)


def time_steps(case: str, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a step of one fit, and the last loss, which shows that both train alike."""
    gc.collect()
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    tokens = torch.randint(TOKENS, (options.batch_size, options.length + 1), generator=generator)
    batches = TimedBatches((tokens[:, :-1], tokens[:, 1:].clone()), options.steps + BETWEEN_FITS + 1)
    module = model(options)
    train(case, module, batches, options.stage)
    return batches.step_s(), float(module.trainer.callback_metrics["train/loss"])


def run_rank(options: argparse.Namespace) -> Any:
    """All rounds of both cases, in one of the two processes."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    measured = interleave({name: partial(time_steps, name, options) for name in CASES}, options.rounds)
    dist.destroy_process_group()
    return measured


def figures(measured: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Step times of each case, and ours against Lightning's in the same round."""
    step_s = {name: [seconds for seconds, _ in rounds] for name, rounds in measured.items()}
    ratio = ratios(step_s["azureml_deepspeed"], step_s["lightning"])
    return {
        "step_s": {name: spread(values) for name, values in step_s.items()},
        "ratio_to_lightning": ratio,
        "target": {"azureml_deepspeed_at_most": TARGET, "met": ratio.median <= TARGET},
        "rounds_step_s": step_s,
        "last_loss": {name: rounds[-1][1] for name, rounds in measured.items()},
    }


def parse() -> argparse.Namespace:
    parser = job_harness.parser(__doc__, "zero_step")
    parser.add_argument("--rounds", type=int, default=16, help="even, so that each order comes as often")
    parser.add_argument("--steps", type=int, default=20, help="timed in each fit")
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step and rank")
    return parser.parse_args()


def main() -> None:
    options = parse()
    measured = job_harness.run("zero_step", options, run_rank, lambda options: job_harness.run_job(options, figures))
    if measured is None:
        return
    rows = [[case, measured["step_s"][case].text(1e3)] for case in CASES]
    show(f"ZeRO stage {options.stage}, two ranks: median (quartiles)", ["case", "step, ms"], rows)
    print(f"ours to Lightning's: {measured['ratio_to_lightning'].text(digits=3)}")


if __name__ == "__main__":
    main()
