"""Trains a case for real, and writes what tensors took beside what the plan says; one process of a job.

    python tests/planning/measured.py CASE RESULTS

CASE is the JSON of a `Case`. What tensors take is told by torch's allocator, as the profiler records it: each
allocation and each release, in the process's own thread. Gloo releases some tensors in threads of its own, which nobody
records. So the bytes between two steps are those of all tensors that Python's garbage collector knows, and the
allocator tells how far a step rises above them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from azureml_strategy.models import GPTConfig, ImageClassifier, LanguageModel, ResNet50
from azureml_strategy.planning.footprint import footprint_of
from azureml_strategy.planning.memory import Placement, memory_of, naive_bytes
from azureml_strategy.planning.optimizer_states import optimizer_states
from azureml_strategy.strategies import (
    AzureMLDDPStrategy,
    AzureMLDeepSpeedStrategy,
    AzureMLLocalSGDStrategy,
    AzureMLModelParallelStrategy,
    PipelineStrategy,
)

STEPS = 3
BUCKET = 1_000_000
MICRO_BATCHES = 4
_START, _END = "a step starts", "a step ends"


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        model: `gpt_tiny`, `gpt_125m` or `resnet50`.
        strategy: a name of `Placement`; `ddp_copies` has no views of buckets.
        ranks: processes of the job.
        precision: Lightning's name.
        batch: samples of a rank and step.
        size: tokens of a sequence or pixels of a side; 0 for those of the configuration.
        recompute: activation checkpointing of the strategy.
        frozen: whether the first block is.
    """

    model: str
    strategy: str
    ranks: int = 1
    precision: str = "32-true"
    batch: int = 4
    size: int = 0
    recompute: bool = False
    frozen: bool = False


class Frozen(LanguageModel):
    """A GPT whose first block does not train."""

    def configure_model(self) -> None:
        super().configure_model()
        self.layers[1].requires_grad_(False)


def module_of(case: Case) -> LightningModule:
    if case.model == "resnet50":
        return ImageClassifier(ResNet50(num_classes=1000))
    small = {"norm": "rmsnorm", "positions": "rotary", "mlp": "swiglu", "tied": True, "bias": False}
    large = {"norm": "layernorm", "positions": "learned", "mlp": "gelu", "tied": True, "bias": True}
    shapes: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
        "gpt_tiny": ((256, 128, 4, 128, 4, 344), small),
        "gpt_125m": ((50257, 1024, 12, 768, 12, 3072), large),
    }
    shape, others = shapes[case.model]
    return (Frozen if case.frozen else LanguageModel)(GPTConfig(*shape, **others))


def batch_of(case: Case) -> tuple[Tensor, Tensor]:
    if case.model == "resnet50":
        side = case.size or 224
        return torch.zeros(case.batch, 3, side, side, dtype=torch.uint8), torch.arange(case.batch)
    length = case.size or (128 if case.model == "gpt_tiny" else 1024)
    tokens = torch.randint(256, (case.batch, length + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def strategy_of(case: Case) -> Any:
    name = case.strategy
    if name.startswith("zero"):
        return AzureMLDeepSpeedStrategy(stage=int(name[-1]), allgather_bucket_size=BUCKET, reduce_bucket_size=BUCKET)
    if name == "fsdp2":
        return AzureMLModelParallelStrategy(tensor_parallel_size=1, activation_checkpointing=case.recompute)
    if name == "pipeline":
        return PipelineStrategy(
            num_stages=case.ranks, micro_batches=MICRO_BATCHES, activation_checkpointing=int(case.recompute)
        )
    if name == "local_sgd":
        return AzureMLLocalSGDStrategy(period=2)
    return AzureMLDDPStrategy(gradient_as_bucket_view=name == "ddp")


def planned(case: Case, rank: int) -> dict[str, Any]:
    """What the plan says for a rank."""
    name, pipeline = case.strategy, case.strategy == "pipeline"
    module, batch = module_of(case), batch_of(case)
    micro = tuple(each.chunk(MICRO_BATCHES)[0] for each in batch) if pipeline else batch
    footprint = footprint_of(module, micro, case.precision)
    sgd = case.model == "resnet50"

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if sgd:
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-5)
        return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)

    placement = Placement(
        strategy="ddp" if name == "ddp_copies" else name,  # type: ignore[arg-type]
        replicas=1 if pipeline else case.ranks,
        stages=case.ranks if pipeline else 1,
        stage=rank if pipeline else 0,
        micro_batches=MICRO_BATCHES,
        recompute=case.recompute,
        bucket_views=name != "ddp_copies",
        reduce_bucket=BUCKET,
        outer=False,
    )
    memory = memory_of(footprint, placement, optimizer_states(make, device="cpu"))
    return {**asdict(memory), "allocated": memory.allocated, "naive": naive_bytes(footprint, placement)}


class Batches:
    """The same batch again and again."""

    def __init__(self, batch: Any) -> None:
        self.batch, self.batch_size = batch, len(batch[0])

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Any]:
        for _ in range(STEPS):
            yield self.batch


class Marks(Callback):
    """Marks steps in the profile, and counts the tensors between them."""

    def __init__(self) -> None:
        self.before = set(storages())
        self.resident = 0

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        gc.collect()
        self.resident = sum(size for address, size in storages().items() if address not in self.before)
        with record_function(_START):
            pass

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        with record_function(_END):
            pass


def storages() -> dict[int, int]:
    """The address and the bytes of each storage that a tensor of this process has."""
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if not isinstance(each, Tensor):
            continue
        for tensor in (each, each.grad if each.is_leaf else None):
            local = getattr(tensor, "_local_tensor", tensor)
            if local is not None and type(local) in (Tensor, torch.nn.Parameter) and local.device.type == "cpu":
                found[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return found


def rise_of(profiled: Any) -> int:
    """Bytes by which the last step rises above those at its start."""
    events = profiled.profiler.kineto_results.events()
    marked = [each for each in events if each.name() in ("[memory]", _START, _END)]
    live = peak = start = rise = 0
    for each in sorted(marked, key=lambda event: event.start_ns()):
        if each.name() == "[memory]":
            live += each.nbytes()
            peak = max(peak, live)
        elif each.name() == _START:
            start = peak = live
        else:
            rise = peak - start
    return rise


def train(case: Case) -> dict[str, int]:
    batches, marks = Batches(batch_of(case)), Marks()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        module = module_of(case)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            num_nodes=case.ranks,
            max_epochs=1,
            strategy=strategy_of(case),
            precision=case.precision,  # type: ignore[arg-type]
            callbacks=[marks],
            enable_model_summary=False,
            **quiet,  # type: ignore[arg-type]
        )
        trainer.fit(module, batches)
    return {"resident": marks.resident, "peak": marks.resident + rise_of(profiled)}


def main() -> None:
    case = Case(**json.loads(sys.argv[1]))
    rank = int(os.environ.get("RANK", "0"))
    measured = train(case)  # first: what the plan has traced would leave addresses behind
    Path(f"{sys.argv[2]}.{rank}").write_text(json.dumps({"measured": measured, "planned": planned(case, rank)}))


if __name__ == "__main__":
    main()
