"""How fast a GPT of 125 million parameters trains on one GPU: our recipe, its peers, and what each part of it gains.

    python benchmarks/gpt_gpu.py            # one NVIDIA GPU, at most four minutes
    python benchmarks/gpt_gpu.py --smoke    # tiny numbers, also on a CPU: does it run?

- by hand: our model in a loop, eager and compiled, and GPT-2 of transformers compiled, in turns.
- recipe: fits by our recipe and by stock Lightning. The compiled loop of the same model takes its turns between those
  of each fit. What a part of the recipe gains is told by a fit without it, a line each.
- llama: LoRA on a Llama of 1B shape by `FineTuner`, beside a loop by hand.
- preemption: from the start of the training to the end of its first step, in a process without compiled code, and in
  another one which finds what the first has kept beside its checkpoints.

16 sequences of 1,024 tokens a step (8 for the Llama), in bf16. The device is waited for only at the ends of a turn. A
part whose time is over is left out; results are written after each fit.

Targets on an H100: the recipe at least 0.98 of the compiled loop and 468,000 tokens a second, which is what llm.c
reaches; with LoRA 0.95 of the loop; the first step after a preemption at most 0.4 of the cold one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gpt_cases
import llama_cases
import torch
from fits import Measured, figures, has_failed, measure, targets
from harness import RESULTS, save, show, spread
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader
from turns import DEVICE, Plan, device_clock, turns_by_hand

from azureml_strategy.strategies import AzureMLDDPStrategy
from azureml_strategy.tracking.timing.goodput import process_age_s

NAME = "gpt_gpu"
ENVIRONMENT = dict(os.environ)  # before a Trainer of this process writes into it where its ranks meet
BUDGET_S = 235.0  # `resnet50_gpu.py` has the rest of eight minutes
COMPILE_S = 25.0  # what compiling a model may take; with less left no further fit is begun
# Of the budget, when each part must have ended.
SHARES = {"by_hand": 0.3, "recipe": 0.75, "llama": 0.9, "preemption": 1.0}
TARGETS = {"recipe": (0.98, 468_000.0), "llama": (0.95, 0.0), "preemption": 0.4}


class Session:
    """The parts of a run, each of which writes its figures as they come."""

    def __init__(self, options: argparse.Namespace, started: float) -> None:
        self.options, self.started = options, started
        self.found: dict[str, Any] = {}
        self.smoke = options.smoke
        self.shape = gpt_cases.SMALL if self.smoke else gpt_cases.GPT_125M
        self.rows, self.llama_rows = (2, 2) if self.smoke else (16, 8)
        self.plan = Plan(2, 1, options.rounds) if self.smoke else Plan(8, 20, options.rounds)

    def deadline(self, part: str) -> float:
        return self.started + SHARES[part] * self.options.budget

    def keep(self, part: str, found: Mapping[str, Any]) -> None:
        """Write what there is."""
        self.found[part] = found
        self.found["wall_s"] = time.monotonic() - self.started
        settings = {"smoke": self.smoke, "budget_s": self.options.budget, "rows": self.rows, "rounds": self.plan.rounds}
        save(NAME, settings, self.found, self.options.results)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Have an error of a part cost only its own figures."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.keep(name, {"left_out": {"all": f"failed: {type(error).__name__}: {error}".splitlines()[0]}})


def mfu(step_s: Mapping[str, float], flops: float) -> dict[str, float]:
    """Model FLOPs utilisation, where the peak of the device is known."""
    peak = get_available_flops(DEVICE, torch.bfloat16) if DEVICE.type == "cuda" else None
    return {name: flops / seconds / peak for name, seconds in step_s.items()} if peak else {}


def by_hand(session: Session) -> None:
    """The loops alone."""
    shape, plan = session.shape, session.plan
    batches = gpt_cases.make_batches(shape.vocab_size, session.rows, shape.context)
    module = partial(gpt_cases.make_module, shape)
    loops = {
        "compiled": gpt_cases.by_hand(module(), len(plan) + 1, compiled=True, precision=torch.bfloat16).step,
        "eager": gpt_cases.by_hand(module(), len(plan) + 1, compiled=False, precision=torch.bfloat16).step,
        "transformers' GPT-2, compiled": gpt_cases.gpt2_by_hand(shape, len(plan) + 1, torch.bfloat16),
    }
    found = turns_by_hand(loops, batches, plan, session.deadline("by_hand"))
    tokens = batches[0][0].numel()
    step_s = {name: spread(values) for name, values in found.step_s.items()}
    medians = {name: each.median for name, each in step_s.items()}
    session.keep(
        "by_hand",
        {
            "tokens_per_s": {name: spread([tokens / each for each in values]) for name, values in found.step_s.items()},
            "step_s": medians,
            "mfu": mfu(medians, module().training_flops(batches[0])),
            "first_step_s": found.first_s,
            "peak_memory_gib": found.peak_gib,
            "left_out": {} if step_s else {"all": "skipped: the time was over"},
        },
    )


def keep_fits(session: Session, part: str, fits: Iterator[Measured], tokens: int, flops: float) -> None:
    """Write the figures of a part after each of its fits."""
    for measured in fits:
        found = figures(measured, "tokens", tokens)
        found |= {"mfu": mfu(found["step_s"], flops), "targets": targets(found, "tokens", *TARGETS[part])}
        session.keep(part, found)


def by_recipe(session: Session) -> None:
    """Our recipe, stock Lightning, and the ablation."""
    shape, plan, cases = session.shape, session.plan, gpt_cases.CASES
    batches = gpt_cases.make_batches(shape.vocab_size, session.rows, shape.context)
    module = gpt_cases.make_module(shape)
    loop = gpt_cases.by_hand(module, len(cases) * len(plan), compiled=True, precision=torch.bfloat16)
    fits = {name: partial(gpt_cases.train, case, shape) for name, case in cases.items()}
    measured = measure(fits, batches, loop.step, plan, session.deadline("recipe"), COMPILE_S)
    keep_fits(session, "recipe", measured, batches[0][0].numel(), module.training_flops(batches[0]))


def with_lora(session: Session) -> None:
    """A Llama with adapters."""
    shape = llama_cases.SMALL if session.smoke else llama_cases.LLAMA_1B
    length = shape["max_position_embeddings"] // 2
    batches = gpt_cases.make_batches(shape["vocab_size"], session.llama_rows, length)
    with tempfile.TemporaryDirectory() as temporary:
        folder = llama_cases.save_llama(shape, Path(temporary))
        loop = llama_cases.by_hand(folder, len(llama_cases.CASES) * len(session.plan))
        fits = {name: partial(llama_cases.train, case, folder) for name, case in llama_cases.CASES.items()}
        measured = measure(fits, batches, loop, session.plan, session.deadline("llama"), COMPILE_S)
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) // 2
        tokens = batches[0][0].numel()
        keep_fits(session, "llama", measured, tokens, 4.0 * weights * tokens)  # as `FineTuner.training_flops`


class FirstStep(Callback):
    """Notes when the first step has ended."""

    def on_train_start(self, *_: Any) -> None:
        self._start = device_clock()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            self.step_s = device_clock() - self._start
            self.age_s = process_age_s()


def first_step(folder: Path, smoke: bool) -> dict[str, float]:
    """Train a few steps in this process; the seconds of the first, and from the process's start to its end."""
    from azureml_strategy.strategies.compilation.cache import CompileCache  # each Trainer of a job has it

    shape, rows = (gpt_cases.SMALL, 2) if smoke else (gpt_cases.GPT_125M, 16)
    callback = FirstStep()
    trainer = Trainer(
        strategy=AzureMLDDPStrategy(compile="blocks"),
        max_steps=5,  # the cache looks for new code after the first, the second and the fourth
        accelerator="gpu" if DEVICE.type == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed",
        default_root_dir=folder,
        callbacks=[callback, CompileCache()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = gpt_cases.make_batches(shape.vocab_size, rows, shape.context, count=5)
    trainer.fit(gpt_cases.make_module(shape), DataLoader(batches, batch_size=None))
    return {"step_s": callback.step_s, "from_start_s": callback.age_s}


def after_preemption(session: Session) -> None:
    """Two processes, the second with what the first has kept, on a node that has nothing else."""
    found: dict[str, Any] = {"left_out": {}}
    with tempfile.TemporaryDirectory() as temporary:
        for attempt in ("cold", "kept"):
            left_s = session.deadline("preemption") - time.monotonic()
            if left_s < COMPILE_S:
                found["left_out"][attempt] = f"skipped: less than {COMPILE_S:.0f} s were left"
                break
            node = Path(temporary, attempt)
            node.mkdir()
            environ = {**ENVIRONMENT, "TMPDIR": str(node)}  # torch and Triton keep compiled code there
            for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
                environ.pop(name, None)
            command = [sys.executable, __file__, "--first-step", f"{temporary}/output", "--results", temporary]
            subprocess.run(command + ["--smoke"] * session.smoke, env=environ, check=True, timeout=left_s)
            found[attempt] = json.loads(Path(temporary, "first_step.json").read_text())
    if "kept" in found:
        ratio = found["kept"]["step_s"] / found["cold"]["step_s"]
        found |= {
            "kept_to_cold": ratio,
            "targets": {"at_most": TARGETS["preemption"], "met": ratio <= TARGETS["preemption"]},
        }
    session.keep("preemption", found)


def rows(found: Mapping[str, Any]) -> list[list[str]]:
    table = []
    for part in SHARES:
        each = found[part]
        for name, rate in each.get("tokens_per_s", {}).items():
            step_ms = f"{1e3 * each['step_s'][name]:.1f}"
            to_loop = each["to_loop"][name].text(digits=3) if name in each.get("to_loop", {}) else ""
            share = f"{each['mfu'][name]:.2f}" if each["mfu"] else ""
            peak = f"{each['peak_memory_gib'].get(name, 0.0):.1f}"
            table.append([part, name, rate.text(digits=0), step_ms, to_loop, share, peak])
        table += [[part, name, words, "", "", "", ""] for name, words in each["left_out"].items()]
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each case; fewer where the time is over")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds after which no turn is begun")
    parser.add_argument("--smoke", action="store_true", help="tiny numbers, on any device")
    parser.add_argument("--first-step", type=Path, help="folder of a job's output; for the script itself")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write gpt_gpu.json into")
    options = parser.parse_args()
    if DEVICE.type != "cuda" and not options.smoke:
        parser.error("no CUDA device is visible; --smoke runs tiny numbers on the CPU")
    if options.smoke:
        options.budget = 3600.0  # nobody knows how slow a CPU is
    return options


def main() -> None:
    options = parse()
    options.results = options.results.resolve()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_float32_matmul_precision("high")
    if options.first_step:
        found = first_step(options.first_step, options.smoke)
        (options.results / "first_step.json").write_text(json.dumps(found))
        return
    session = Session(options, time.monotonic())
    parts = {"by_hand": by_hand, "recipe": by_recipe, "llama": with_lora, "preemption": after_preemption}
    for name, part in parts.items():
        with session.part(name):
            part(session)
    columns = ["part", "case", "tokens/s", "ms a step", "of the loop", "MFU", "GiB"]
    show("GPT-125M: median (quartiles)", columns, rows(session.found))
    if "kept_to_cold" in session.found["preemption"]:
        print(f"first step after a preemption: {session.found['preemption']['kept_to_cold']:.2f} of the cold one")
    if has_failed(*(session.found[part] for part in SHARES)):
        sys.exit(1)


if __name__ == "__main__":
    main()
