"""The shipped models compiled, under each strategy, against the same training uncompiled.

    python tests/gpu/compiling.py OUTPUT [--accelerator cuda] [--layouts zero_2 fsdp2 ...] [--few]

Each cell is trained twice in this process, by the same layout in the same precision. What the whole matrix finds out is
whether a layout trains rightly at all; what is asked here is what compiling changes.
"""

from __future__ import annotations

import gc
import json
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from tests.gpu.matrix import Results, make_trainer, parse, prepare
from tests.multiprocess.scripts.families import make_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.models import Bottleneck, FineTuner, GPTConfig, ImageClassifier, LanguageModel

STEPS, ROWS, LENGTH, PIXELS, TOKENS, CLASSES = 4, 8, 16, 32, 64, 8
MODELS = ("gpt", "resnet", "llama")
WAYS: dict[str, dict[str, str]] = {
    "blocks": {"compile": "blocks"},
    "whole": {"compile": "whole"},
    "CUDA graphs": {"compile": "blocks", "compile_mode": "reduce-overhead"},
}
# What is compiled shares its ways of compiling; DDP has them all.
COMPILED_LAYOUTS = ("azureml_ddp", "zero_2", "zero_3", "fsdp2", "pipeline")
PRECISIONS = {"azureml_ddp": ("32-true", "bf16-mixed", "16-mixed")}
# Of the losses, relative to the first. A compiled kernel keeps in float32 what eager kernels round between them, by a
# bit of bfloat16 (8) or float16 (11), and sums in another order.
TOLERANCE = {"32-true": 1e-4, "bf16-mixed": 2.0**-7, "16-mixed": 2.0**-9}
# FineTuner's model has no layers by which a pipeline of one stage would be another thing than its blocks.
LEFT_OUT = {("pipeline", "llama")}
_SAYS = ("could not be compiled", "was compiled again", "is cut at")
Cell = tuple[str, str, str, str]


class SmallResNet(nn.Module):
    """A bottleneck with a shortcut of its own, and two without."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Bottleneck(3, 8, 2), Bottleneck(32, 8, 1), Bottleneck(32, 8, 1))
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(32, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.pool(self.blocks(images)))
        return logits

    def chain(self) -> list[tuple[str, str]]:
        return [("blocks", "blocks"), ("pool", "pool"), ("fc", "fc")]


def make_module(model: str, folder: Path) -> LightningModule:
    """One of the shipped models, tiny; its weights are the same each time."""
    torch.manual_seed(3)
    if model == "gpt":
        network = GPTConfig(TOKENS, LENGTH, layers=2, width=32, heads=2, mlp_width=64)
        return LanguageModel(network, learning_rate=1e-2, warmup_steps=0)
    if model == "resnet":
        return ImageClassifier(SmallResNet(), learning_rate=1.0, warmup_epochs=0, channels_last=True)
    return FineTuner(str(folder), learning_rate=1e-2, warmup_steps=0)


def loader(model: str) -> DataLoader[tuple[Tensor, ...]]:
    """The same rows in each step."""
    random = torch.Generator().manual_seed(7)
    if model == "resnet":
        inputs = torch.randn(ROWS, 3, PIXELS, PIXELS, generator=random)
        targets = torch.arange(ROWS) % CLASSES
    else:
        inputs = torch.randint(1, TOKENS, (ROWS, LENGTH), generator=random)
        targets = inputs.roll(-1, dims=1)
    rows = TensorDataset(*(torch.cat([each] * STEPS) for each in (inputs, targets)))
    return DataLoader(rows, ROWS)


def cells(layouts: Sequence[str], few: bool = False) -> list[Cell]:
    """Layout, precision, model, and way of compiling; of few, one of each layout."""
    return [
        (layout, precision, model, way)
        for layout in layouts
        if layout in COMPILED_LAYOUTS
        for precision in (("bf16-mixed",) if few else PRECISIONS.get(layout, ("32-true", "bf16-mixed")))
        for model in (MODELS[:1] if few else MODELS)
        for way in (WAYS if layout == "azureml_ddp" and not few else ("blocks",))
        if (layout, model) not in LEFT_OUT
    ]


class Losses(Callback):
    """The loss of each step."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].detach().float().clone())  # a CUDA graph writes the next one over it


def train(layout: str, precision: str, model: str, accelerator: str, how: Mapping[str, str], folder: Path) -> Results:
    """Losses of a training, how many graphs it has compiled, and what it said of them; or the error."""
    torch._dynamo.reset()
    counters.clear()
    gc.collect()
    callback = Losses()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            trainer = make_trainer(
                *(layout, precision, accelerator), how, max_steps=STEPS, limit_val_batches=0, callbacks=[callback]
            )
            trainer.fit(make_module(model, folder), loader(model))
        except Exception as error:  # each is to be judged, whatever another one does
            last = "".join(traceback.format_exception(error)[-8:])
            return {"error": f"{type(error).__name__}: {error}", "steps": len(callback.losses), "trace": last}
    return {
        "losses": [float(loss) for loss in callback.losses],
        "graphs": counters["stats"]["unique_graphs"],
        "without_cuda_graph": counters["inductor"]["cudagraph_skips"],
        "said": [str(each.message) for each in said if any(words in str(each.message) for words in _SAYS)],
    }


def judge(compiled: Results, eager: Results, precision: str) -> tuple[bool, str]:
    """Whether a compiled training is right, and how far it is from the eager one, or what is wrong."""
    for name, result in {"uncompiled": eager, "compiled": compiled}.items():
        if "error" in result:
            return False, f"{name}, after {result['steps']} steps: {result['error']}"[:400]
    losses, first = eager["losses"], eager["losses"][0]
    if not max(losses) - min(losses) > 10 * TOLERANCE[precision] * first:
        return False, f"it learns too little to tell anything: {losses}"
    if not compiled["graphs"]:
        return False, "nothing was compiled"
    if compiled["said"]:
        return False, compiled["said"][0][:400]
    apart = [abs(one - other) / first for one, other in zip(compiled["losses"], losses, strict=True)]
    largest = float(torch.tensor(apart).max())  # of what is not a number, that
    words = f"{largest:.1e} from uncompiled, {compiled['graphs']} graphs"
    skipped = compiled["without_cuda_graph"]
    return largest <= TOLERANCE[precision], words + (f", {skipped} without a CUDA graph" if skipped else "")


def run(chosen: Sequence[Cell], accelerator: str, file: Path, folder: Path) -> None:
    """Train the cells and write each as it ends."""
    eager: dict[tuple[str, ...], Results] = {}
    for layout, precision, model, way in chosen:
        pair = layout, precision, model
        if pair not in eager:
            eager[pair] = train(*pair, accelerator, {}, folder)
        compiled = train(*pair, accelerator, WAYS[way], folder)
        right, words = judge(compiled, eager[pair], precision)
        line = ["/".join((*pair, way)), {"right": right, "words": words, "trace": compiled.get("trace")}]
        with file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")


def main() -> None:
    options = parse(__doc__)
    prepare()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        make_model("llama").save_pretrained(folder)
        run(cells(options.layouts, options.few), options.accelerator, options.output / "0.jsonl", Path(folder))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
