"""What it takes to load a pretrained model that is cut over the ranks: memory of each rank, and bytes that are read.

    python benchmarks/pretrained_memory.py                                       # 1 GB of float32, two ranks
    python benchmarks/pretrained_memory.py --strategy azureml_model_parallel

A folder with a Llama of random weights is written first. Then both ranks of an emulated job load it in configure_model.
The peak is the kernel's (VmHWM), above what the process held before the load.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import Any

import job_harness
import torch
import torch.distributed as dist
from harness import show
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from azureml_strategy.huggingface.loading import load_pretrained

STRATEGIES = ("azureml_deepspeed_stage_3", "azureml_deepspeed_stage_3_offload", "azureml_model_parallel", "azureml_ddp")
# Above its memory before the load, a rank may take this part of the file and these bytes; all may read this part.
PEAK_PART, PEAK_BYTES, READ_PART = 0.55, 300e6, 1.05
TOKENS = 16384


class Loaded(LightningModule):
    """A pretrained model. It notes what its load took."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.memory = self.peak = self.read = 0

    def configure_model(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self.memory, self.read = status("VmRSS"), bytes_read()
        self.model = load_pretrained(self.folder)

    def on_validation_start(self) -> None:
        # Under FSDP2 the weights are read when their shards are known, after configure_model.
        self.peak, self.read = status("VmHWM") - self.memory, bytes_read() - self.read

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("loss", self.model(input_ids=batch, labels=batch).loss, sync_dist=True)


def status(name: str) -> int:
    """Return bytes of this process's memory: VmRSS, now, or VmHWM, the most since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def bytes_read() -> int:
    """Return bytes that this process has read from files, and from sockets by the same calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def write_model(folder: Path, options: argparse.Namespace) -> None:
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=options.width,
        intermediate_size=int(2.75 * options.width),
        num_hidden_layers=options.layers,
        num_attention_heads=8,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="400MB")


def run_rank(options: argparse.Namespace) -> Any:
    """Load, and use the model once."""
    module = Loaded(options.rank_results.parent / "model")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", strategy=options.strategy, enable_model_summary=False, **quiet)
    trainer.validate(module, DataLoader(torch.randint(TOKENS, (2, 8)), batch_size=1), verbose=False)
    ranks: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
    dist.all_gather_object(ranks, {"peak_bytes": module.peak, "read_bytes": module.read})
    dist.destroy_process_group()
    return ranks


def figures(ranks: list[dict[str, int]], size: int) -> dict[str, Any]:
    """What the ranks took, beside the files' size and the targets."""
    peak, read = max(rank["peak_bytes"] for rank in ranks), sum(rank["read_bytes"] for rank in ranks)
    most = PEAK_PART * size + PEAK_BYTES
    return {
        "file_bytes": size,
        "ranks": ranks,
        "target": {"peak_bytes_at_most": most, "read_bytes_at_most": READ_PART * size},
        "met": {"peak_bytes": peak <= most, "read_bytes": read <= READ_PART * size},
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    write_model(Path("model"), options)
    size = sum(file.stat().st_size for file in Path("model").glob("*.safetensors"))
    return job_harness.run_job(options, lambda ranks: figures(ranks, size))


def parse() -> argparse.Namespace:
    parser = job_harness.parser(__doc__, "pretrained_memory")
    parser.add_argument("--strategy", default=STRATEGIES[0], choices=STRATEGIES)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--width", type=int, default=1024)
    return parser.parse_args()


def main() -> None:
    options = parse()
    measured = job_harness.run("pretrained_memory", options, run_rank, measure)
    if measured is None:
        return
    rows = [
        [str(rank), f"{each['peak_bytes'] / 1e6:,.0f}", f"{each['read_bytes'] / 1e6:,.0f}"]
        for rank, each in enumerate(measured["ranks"])
    ]
    title = f"{options.strategy}: loading {measured['file_bytes'] / 1e6:,.0f} MB on two ranks"
    show(title, ["rank", "peak, MB", "read, MB"], rows)
    print(f"targets met: {measured['met']}")


if __name__ == "__main__":
    main()
