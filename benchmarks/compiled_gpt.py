"""What a step of a compiled GPT-tiny costs under `azureml_ddp`, beside the same model in a hand-written compiled loop.

    python benchmarks/compiled_gpt.py            # two cores, 7 minutes
    python benchmarks/compiled_gpt.py --smoke    # tiny numbers: does it run?

All train the same model on the same batches, with the same clipping, AdamW and schedule, in one process. They take
turns of a few steps, in the middle of the fit: its data loader lets the loops have their turns. A cost is CPU seconds;
torch computes in the main thread alone, and what other threads take counts as the fit's. Each case is a process with an
empty cache, whose first step has the time of compiling. The loop compiles the network with its loss, as whoever writes
it by hand can; so it is the peer of compile=whole. A second one has its layers compiled in place, as compile=blocks
has, and so has stock Lightning.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from ddp_step import without_our_callbacks
from gpt_cases import by_hand, make_batches, make_module
from harness import RESULTS, ratios, save, show, spread
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from turns import Plan, Turns

from azureml_strategy.models import GPTConfig, LanguageModel
from azureml_strategy.strategies import AzureMLDDPStrategy

NAME = "compiled_gpt"
TARGET = 1.03  # CPU seconds of compile=whole after the warm-up, to the loop's, which is compiled as a whole too
CASES = ("blocks", "whole", "lightning")
WARMUP_STEPS = 6  # compiling, and DDP's new buckets after the first
TINY = GPTConfig(vocab_size=256, context=128, layers=4, width=128, heads=4, mlp_width=344)  # conf/model/gpt_tiny.yaml
SMOKE = GPTConfig(vocab_size=16, context=8, layers=2, width=8, heads=2, mlp_width=16)
MODEL = {"learning_rate": 2e-3, "fused": True}  # by default AdamW is fused on GPUs alone; the loop's is here, too
BATCHES = 8  # different ones


def cpu_s() -> float:
    """CPU seconds of this thread, and of the processes that this one has waited for, as compilers."""
    return time.thread_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


class OtherThreads(Callback):
    """CPU seconds of all threads but the main one in a step of the fit's turns that count."""

    def __init__(self) -> None:
        self._sum_s, self._steps = 0.0, 0

    @property
    def step_s(self) -> float:
        return self._sum_s / self._steps

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._start = time.process_time() - time.thread_time()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx >= WARMUP_STEPS:
            self._sum_s += time.process_time() - time.thread_time() - self._start
            self._steps += 1


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
    loop = by_hand(make_module(shape, **MODEL), len(plan) + 1, compiled=True)
    in_blocks = make_module(shape, **MODEL)
    for layer in in_blocks.layers:
        layer.compile()
    loop_in_blocks = by_hand(in_blocks, len(plan) + 1, compiled=False)
    batches, others = make_batches(shape.vocab_size, options.batch_size, shape.context, BATCHES), OtherThreads()
    losses: list[Tensor] = []
    peers = {"loop": lambda batch: losses.append(loop.step(batch)), "loop in blocks": loop_in_blocks.step}
    turns = Turns("fit", batches, peers, plan, clock=cpu_s)
    trainer = fit(options.case, make_module(shape, **MODEL), turns, others)
    return {
        "fit_s": [each + others.step_s for each in turns.found.step_s["fit"]],
        "loop_s": turns.found.step_s["loop"],
        "loop_in_blocks_s": turns.found.step_s["loop in blocks"],
        "other_threads_s": others.step_s,
        "first_step_s": turns.found.first_s,
        "last_loss": {"fit": float(trainer.callback_metrics["train/loss"]), "loop": float(losses[-1])},
    }


def in_a_process(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """A case in a process with a cache of its own, which is empty."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "measured.json")
        environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environ["OMP_NUM_THREADS"] = "1"  # a Trainer gives torch its threads anew, and idle ones spin
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
            "step_cpu_s": {each: spread(found[f"{each}_s"]) for each in ("fit", "loop", "loop_in_blocks")},
            "ratio_to_loop": ratio,
            "ratio_to_loop_in_blocks": ratios(found["fit_s"], found["loop_in_blocks_s"]),
            "other_threads_cpu_s": found["other_threads_s"],
            "first_step_cpu_s": found["first_step_s"],
            "last_loss": found["last_loss"],
        }
        if case == "whole":
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
            each["ratio_to_loop_in_blocks"].text(digits=3),
            f"{each['first_step_cpu_s']['fit']:.1f}, loop {each['first_step_cpu_s']['loop']:.1f}",
        ]
        for case, each in found.items()
    ]
    columns = ["case", "step, ms", "loop", "to the loop", "to it in blocks", "first step, s"]
    show("Compiled GPT-tiny, CPU seconds: median (quartiles)", columns, rows)


if __name__ == "__main__":
    main()
