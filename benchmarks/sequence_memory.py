"""What a rank keeps for the backward pass when sequences are shared, beside DDP: activations, masks and logits.

    python benchmarks/sequence_memory.py                       # a Llama, 4,096 tokens a sequence, two ranks
    python benchmarks/sequence_memory.py --tokens 8192

Both ranks of an emulated job train one step of the same global batch, first under azureml_ddp, then with
sequence_parallel_size=2. Counted are the bytes of all tensors that autograd saves, each storage once, without
parameters. The figure does not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import job_harness
import torch
import torch.distributed as dist
from harness import show
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from azureml_strategy.strategies import AzureMLDDPStrategy, AzureMLModelParallelStrategy

VOCABULARY = 8192
# What the ranks keep at most, of what one keeps that has whole sequences: half, and a little that is not shared.
TARGET = 0.52


class Counted(LightningModule):
    """A Llama of random weights. It counts what its step saves."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        torch.manual_seed(0)
        shape = {"hidden_size": options.width, "intermediate_size": 3 * options.width, "num_attention_heads": 8}
        config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=options.layers, **shape)
        self.model = LlamaForCausalLM(config)
        self.saved = 0
        self.loss = 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        storages: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if not isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter):
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.saved, self.loss = sum(storages.values()), float(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def step(strategy: Strategy, replicas: int, options: argparse.Namespace) -> dict[str, float]:
    module = Counted(options)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", strategy=strategy, max_steps=1, enable_model_summary=False, **quiet)
    rows = torch.randint(VOCABULARY, (2, options.tokens), generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(rows, batch_size=2 // replicas))
    # A rank of DDP has one sequence, a rank of the pair has both.
    return {"saved_bytes_a_sequence": module.saved * replicas / 2, "loss": module.loss}


def run_rank(options: argparse.Namespace) -> Any:
    found = {
        "azureml_ddp": step(AzureMLDDPStrategy(), 2, options),
        "sequence_parallel_size=2": step(AzureMLModelParallelStrategy(sequence_parallel_size=2), 1, options),
    }
    ranks: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
    dist.all_gather_object(ranks, found)
    dist.destroy_process_group()
    return ranks


def figures(ranks: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    most = {name: max(rank[name]["saved_bytes_a_sequence"] for rank in ranks) for name in ranks[0]}
    ratio = most["sequence_parallel_size=2"] / most["azureml_ddp"]
    return {"ranks": ranks, "most_bytes_a_sequence": most, "ratio": ratio, "target": TARGET, "met": ratio <= TARGET}


def parse() -> argparse.Namespace:
    parser = job_harness.parser(__doc__, "sequence_memory")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    return parser.parse_args()


def main() -> None:
    options = parse()
    measured = job_harness.run("sequence_memory", options, run_rank, lambda given: job_harness.run_job(given, figures))
    if measured is None:
        return
    rows = [[name, f"{size / 1e6:,.1f}"] for name, size in measured["most_bytes_a_sequence"].items()]
    show(f"{options.tokens} tokens on two ranks", ["strategy", "kept by a rank for a sequence, MB"], rows)
    print(f"{measured['ratio']:.3f} of DDP's; target met: {measured['met']}")


if __name__ == "__main__":
    main()
