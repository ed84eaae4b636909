"""What a step of a compiled GPT-tiny costs under `azureml_ddp`, beside the same model in a hand-written compiled loop.

    python benchmarks/compiled_gpt.py            # two cores, 5 minutes
    python benchmarks/compiled_gpt.py --smoke    # tiny numbers: does it run?

Both train the same model on the same batches, with the same clipping, AdamW and schedule, in one process. They take
turns of a few steps, in the middle of the fit: its data loader lets the loop have its turn. A cost is CPU seconds;
torch computes in the main thread alone, and what other threads take counts as the fit's. Each case is a process with an
empty cache, whose first step has the time of compiling. The loop compiles the network with its loss, as whoever writes
it by hand can. Stock Lightning trains the layers compiled in place: what it adds to the loop, ours has too.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ddp_step import without_our_callbacks
from harness import RESULTS, ratios, save, show, spread
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from turns import Plan, Turns

from azureml_strategy.models import GPTConfig, LanguageModel, warmup_cosine
from azureml_strategy.models.evaluation import mean_cross_entropy
from azureml_strategy.models.optimizer import decay_groups
from azureml_strategy.strategies import AzureMLDDPStrategy

NAME = "compiled_gpt"
TARGET = 1.03  # CPU seconds of ours after the warm-up, to the loop's
CASES = ("blocks", "whole", "lightning")
WARMUP_STEPS = 6  # compiling, and DDP's new buckets after the first
TINY = {"vocab_size": 256, "context": 128, "layers": 4, "width": 128, "heads": 4, "mlp_width": 344}  # conf/model
SMOKE = {"vocab_size": 16, "context": 8, "layers": 2, "width": 8, "heads": 2, "mlp_width": 16}
BATCHES = 8  # different ones

Batch = tuple[Tensor, Tensor]


def cpu_s() -> float:
    """CPU seconds of this thread, and of the processes that this one has waited for, as compilers."""
    return time.thread_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def make_module(shape: dict[str, int]) -> LanguageModel:
    """The model; its weights are the same each time."""
    module = LanguageModel(GPTConfig(**shape), learning_rate=2e-3, warmup_steps=40)
    module.configure_model()
    return module


def make_batches(shape: dict[str, int], size: int) -> list[Batch]:
    random = torch.Generator().manual_seed(0)
    rows = torch.randint(shape["vocab_size"], (BATCHES, size, shape["context"] + 1), generator=random)
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in rows]


class HandWritten:
    """The loop by hand: what a step of ours does, and nothing else.

    Args:
        module: only its layers and settings are used.
        total: steps of the whole training.
    """

    def __init__(self, module: LanguageModel, total: int) -> None:
        settings, network = module.hparams, nn.Sequential(*module.layers)

        def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
            return mean_cross_entropy(network(tokens).flatten(0, 1), targets.flatten())

        self.loss_of, self.network = torch.compile(loss_of), network
        groups = decay_groups(network, settings["weight_decay"])
        betas = settings["beta1"], settings["beta2"]
        self.adamw = torch.optim.AdamW(groups, settings["learning_rate"], betas, settings["eps"], fused=True)
        schedule = partial(warmup_cosine, warmup_steps=settings["warmup_steps"], total_steps=total)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.adamw, schedule)
        self.loss = torch.tensor(math.nan)

    def step(self, batch: Batch) -> None:
        loss = self.loss_of(*batch)
        self.adamw.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.adamw.step()
        self.scheduler.step()
        self.loss = loss.detach()


class OtherThreads(Callback):
    """CPU seconds of all threads but the main one in a step, from the first turn that counts to the end."""

    def __init__(self) -> None:
        self.step_s = 0.0

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARMUP_STEPS:
            self._start = time.process_time() - time.thread_time()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.step_s = (time.process_time() - time.thread_time() - self._start) / (trainer.global_step - WARMUP_STEPS)


def fit(case: str, module: LanguageModel, turns: Turns, callback: Callback) -> Trainer:
    arguments: dict[str, Any] = {
        **{"max_epochs": 1, "accelerator": "cpu", "devices": 1, "gradient_clip_val": 1.0, "logger": False},
        **{"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False},
        "callbacks": [callback],
    }
    if case != "lightning":
        trainer = Trainer(strategy=AzureMLDDPStrategy(compile=case), **arguments)
        trainer.fit(module, turns)
        return trainer
    for layer in module.layers:
        layer.compile()
    with without_our_callbacks():
        trainer = Trainer(strategy="ddp", **arguments)
        trainer.fit(module, turns)
    return trainer


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All turns of a case, in this process."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.compile(torch.sin)(torch.ones(8))  # what a compiler asks of the machine once
    shape = SMOKE if options.smoke else TINY
    plan = Plan(WARMUP_STEPS, options.steps, options.rounds)
    loop = HandWritten(make_module(shape), len(plan) + 1)
    batches, others = make_batches(shape, options.batch_size), OtherThreads()
    turns = Turns("fit", batches, {"loop": loop.step}, plan, clock=cpu_s)
    trainer = fit(options.case, make_module(shape), turns, others)
    return {
        "fit_s": [each + others.step_s for each in turns.found.step_s["fit"]],
        "loop_s": turns.found.step_s["loop"],
        "other_threads_s": others.step_s,
        "first_step_s": turns.found.first_s,
        "last_loss": {"fit": float(trainer.callback_metrics["train/loss"]), "loop": float(loop.loss)},
    }


def in_a_process(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """A case in a process with a cache of its own, which is empty."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "measured.json")
        environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        numbers = [f"--rounds={options.rounds}", f"--steps={options.steps}", f"--batch-size={options.batch_size}"]
        command = [sys.executable, __file__, "--case", case, "--output", str(output), *numbers]
        subprocess.run(command + ["--smoke"] * options.smoke, env=environ, cwd=folder, check=True)
        found: dict[str, Any] = json.loads(output.read_text())
    return found


def figures(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    cases = {}
    for case, found in measured.items():
        ratio = ratios(found["fit_s"], found["loop_s"])
        cases[case] = {
            "step_cpu_s": {"fit": spread(found["fit_s"]), "loop": spread(found["loop_s"])},
            "ratio_to_loop": ratio,
            "other_threads_cpu_s": found["other_threads_s"],
            "first_step_cpu_s": found["first_step_s"],
            "last_loss": found["last_loss"],
        }
        if case in ("blocks", "whole"):
            cases[case]["target"] = {"at_most": TARGET, "met": ratio.median <= TARGET}
    return cases


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="turns of each that count")
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step")
    parser.add_argument("--smoke", action="store_true", help="tiny numbers")
    parser.add_argument("--case", choices=CASES, help="this case alone, in this process; for the script itself")
    parser.add_argument("--output", type=Path, help="file for its measurements")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.case:
        options.output.write_text(json.dumps(measure(options)))
        return
    found = figures({case: in_a_process(case, options) for case in CASES})
    settings = {name: getattr(options, name) for name in ("rounds", "steps", "batch_size", "smoke")}
    save(NAME, settings, found, options.results)
    rows = [
        [
            case,
            each["step_cpu_s"]["fit"].text(1e3, 2),
            each["step_cpu_s"]["loop"].text(1e3, 2),
            each["ratio_to_loop"].text(digits=3),
            f"{each['first_step_cpu_s']['fit']:.1f}, loop {each['first_step_cpu_s']['loop']:.1f}",
        ]
        for case, each in found.items()
    ]
    columns = ["case", "step, ms", "loop", "to the loop", "first step, s"]
    show("Compiled GPT-tiny, CPU seconds: median (quartiles)", columns, rows)


if __name__ == "__main__":
    main()
