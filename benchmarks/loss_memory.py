"""What the loss of GPT-2's vocabulary takes in chunks, beside the loss of all logits: memory and processor seconds.

    python benchmarks/loss_memory.py                    # 4,096 tokens, the output matrix of gpt_125m
    python benchmarks/loss_memory.py --tokens 16384

A step is the output layer, its loss and the backward pass, in float32 and under autocast. Counted are the bytes of all
tensors that autograd saves, each storage once, without parameters; and how far the process grows, gradients included.
The peer is what `LanguageModel` did before: `mean_cross_entropy` of the layer's logits.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, interleave, ratios, save, show, spread
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from azureml_strategy.models.evaluation import mean_cross_entropy
from azureml_strategy.models.gpt import OutputLayer

NAME = "loss_memory"
TARGETS = {"saved_bytes": 0.5, "peak_bytes": 0.5}
MEASURES = ("saved_bytes", "peak_bytes", "cpu_s")
Measured = dict[str, float]


def of_logits(layer: OutputLayer, hidden: Tensor, targets: Tensor) -> Tensor:
    return mean_cross_entropy(layer(hidden).flatten(0, 1), targets.flatten())


def in_chunks(layer: OutputLayer, hidden: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = layer(hidden, targets)
    return loss


def step(
    loss_of: Callable[[OutputLayer, Tensor, Tensor], Tensor], autocast: bool, options: argparse.Namespace
) -> Measured:
    torch.manual_seed(0)
    layer = OutputLayer(options.width, options.vocabulary, bias=False)
    hidden = torch.randn(1, options.tokens, options.width, requires_grad=True)
    targets = torch.randint(options.vocabulary, (1, options.tokens))
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    Path("/proc/self/clear_refs").write_text("5")  # the peak of the process begins anew
    before, started = memory("VmRSS"), time.process_time()
    with saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of(layer, hidden, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    taken = {"cpu_s": time.process_time() - started, "peak_bytes": memory("VmHWM") - before}
    return {**taken, "saved_bytes": sum(storages.values()), "loss": loss.item()}


def memory(kind: str) -> int:
    """What the process has in memory, in bytes."""
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) * 1024


def figures(measured: dict[str, list[Measured]]) -> dict[str, Any]:
    def column(case: str, measure: str) -> list[float]:
        return [values[measure] for values in measured[case]]

    found: dict[str, Any] = {"cases": {}, "ratios": {}, "targets": TARGETS}
    for case in measured:
        found["cases"][case] = {measure: spread(column(case, measure)) for measure in (*MEASURES, "loss")}
    for kind in ("float32", "bfloat16"):
        of_kind = (f"in chunks, {kind}", f"of logits, {kind}")
        found["ratios"][kind] = {name: ratios(*(column(case, name) for case in of_kind)) for name in MEASURES}
    met = {name: all(each[name].median <= most for each in found["ratios"].values()) for name, most in TARGETS.items()}
    return {**found, "met": met}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"folder to write {NAME}.json into")
    parser.add_argument("--tokens", type=int, default=4096, help="of a batch")
    parser.add_argument("--width", type=int, default=768, help="of the hidden states")
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    options = parse()
    cases = {
        f"{name}, {kind}": partial(step, loss_of, kind == "bfloat16", options)
        for kind in ("float32", "bfloat16")
        for name, loss_of in (("of logits", of_logits), ("in chunks", in_chunks))
    }
    measured = figures(interleave(cases, options.rounds, options.warmup))
    save(NAME, {name: value for name, value in vars(options).items() if name != "results"}, measured, options.results)
    rows = [
        [case, each["saved_bytes"].text(1e-6), each["peak_bytes"].text(1e-6), each["cpu_s"].text(1.0, 2)]
        for case, each in measured["cases"].items()
    ]
    show(f"{options.tokens} tokens, vocabulary {options.vocabulary}", ["loss", "saved, MB", "peak, MB", "CPU s"], rows)
    for kind, each in measured["ratios"].items():
        print(kind, ", ".join(f"{name} {ratio.text(1.0, 3)}" for name, ratio in each.items()), "of that of logits")
    print("targets met:", measured["met"])


if __name__ == "__main__":
    main()
