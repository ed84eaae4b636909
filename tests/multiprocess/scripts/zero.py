"""A tiny GPT under ZeRO, under DDP and on one process: losses, weights, checkpoints, memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Losses, live_bytes, quiet_trainer, report
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from tests.multiprocess.scripts.strategies import BUCKETS
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.checkpoint.consolidate import consolidate
from azureml_strategy.models import GPTConfig, LanguageModel
from azureml_strategy.strategies import AzureMLDDPStrategy, AzureMLDeepSpeedStrategy

SEQUENCES, LENGTH, TOKENS = 48, 16, 64
GLOBAL_BATCH = 16  # sequences of a step over all processes: 3 steps an epoch, and 2 epochs
VALIDATED = 32  # sequences
FOLDER = Path(os.environ["RESULTS"]).parent
WORLD = int(os.environ["WORLD_SIZE"])
LAYOUTS = sys.argv[2].split(";")

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": AzureMLDDPStrategy,
    "stage_1": partial(AzureMLDeepSpeedStrategy, stage=1, **BUCKETS),
    "stage_2": partial(AzureMLDeepSpeedStrategy, **BUCKETS),
    "stage_3": partial(AzureMLDeepSpeedStrategy, stage=3, **BUCKETS),
    "offload": partial(AzureMLDeepSpeedStrategy, stage=3, offload_optimizer=True, offload_parameters=True, **BUCKETS),
}
# Two batches a step, and a norm that most gradients exceed.
STEP: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
# As a user writes it: the Trainer's numbers once more, "auto", and buffers so small that the parameters count.
JSON = {
    "train_batch_size": GLOBAL_BATCH,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 1000,
        "stage3_prefetch_bucket_size": 1000,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "sub_group_size": "auto",
    },
}


class Weight(Callback):
    """Notes what a model's tensors take up when its gradients are complete, in the second step."""

    def __init__(self) -> None:
        self.before = live_bytes()
        self.bytes = 0

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step == 1:
            self.bytes = live_bytes() - self.before


def tiny_gpt(width: int = 32) -> LanguageModel:
    network = GPTConfig(vocab_size=TOKENS, context=LENGTH, layers=2, width=width, heads=4, mlp_width=2 * width)
    return LanguageModel(network, learning_rate=5e-3, warmup_steps=2, seed=3)


def batches_of(size: int, sequences: int = SEQUENCES) -> DataLoader[tuple[Tensor, ...]]:
    tokens = torch.randint(TOKENS, (sequences, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    tokens[:, 1::2] = tokens[:, 0:-1:2]  # something to learn
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:].clone()), batch_size=size)


def fit(
    name: str, strategy: Strategy, resume: Path | None = None, replicas: int = WORLD, **arguments: Any
) -> dict[str, Any]:
    """Train two epochs, or only the second; each leaves a checkpoint in a folder of this name."""
    seen, size = Losses(), GLOBAL_BATCH // replicas // STEP["accumulate_grad_batches"]
    saver = ModelCheckpoint(FOLDER / f"{name}_{WORLD}", "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    callbacks = [seen, saver]
    trainer = quiet_trainer(
        strategy=strategy, max_epochs=2, callbacks=callbacks, enable_checkpointing=True, **STEP, **arguments
    )
    trainer.fit(tiny_gpt(), batches_of(size), batches_of(size, VALIDATED), ckpt_path=resume)
    return {"losses": seen.losses, "val_loss": float(trainer.callback_metrics["val/loss"])}


def checkpoint(name: str, world: int, epoch: int) -> Path:
    return FOLDER / f"{name}_{world}" / f"epoch={epoch}.ckpt"


def weights(name: str) -> list[float]:
    """The trained weights, out of the last checkpoint."""
    output = FOLDER / f"{name}_{torch.distributed.get_rank()}.ckpt"
    consolidate(checkpoint(name, WORLD, 1), output)
    module = tiny_gpt()
    module.configure_model()
    module.load_state_dict(torch.load(output, weights_only=True)["state_dict"])
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


def validate(saved: Path) -> float:
    """The validation loss of a checkpoint, without a fit before it."""
    trainer = quiet_trainer(strategy=STRATEGIES["stage_3"]())
    trainer.validate(tiny_gpt(), batches_of(GLOBAL_BATCH // WORLD, VALIDATED), ckpt_path=saved, verbose=False)
    return float(trainer.callback_metrics["val/loss"])


def refusal(saved: Path) -> str:
    """What is said to a checkpoint of another layout."""
    try:
        fit("refused", STRATEGIES["stage_2"](), resume=saved)
    except ValueError as error:
        return str(error)
    return "nothing was said"


def one_process() -> dict[str, Any]:
    """DDP, the oracle, reads in one batch what two processes read in two; so do the others, which leave checkpoints."""
    return {name: fit(name, STRATEGIES[name]()) for name in LAYOUTS}


def two_processes() -> dict[str, Any]:
    results = {name: {**fit(name, STRATEGIES[name]()), "weights": weights(name)} for name in LAYOUTS}
    return {**results, **resumed(), **others(), **memory()}


def one_process_again() -> dict[str, Any]:
    return {**resumed(), "validated": validate(checkpoint("stage_3", WORLD, 1))}


def resumed() -> dict[str, Any]:
    names = [name for name in ("stage_1", "stage_3") if name in LAYOUTS]
    return {f"{name}_from_{world}": resume(name, world) for name in names for world in (1, 2)}


def resume(name: str, world: int) -> dict[str, Any]:
    return fit(f"{name}_from_{world}", STRATEGIES[name](), resume=checkpoint(name, world, 0))


def others() -> dict[str, Any]:
    return {
        "bf16": fit("bf16", STRATEGIES["stage_2"](), precision="bf16-mixed"),
        "tensor_parallel": fit("tp", AzureMLDeepSpeedStrategy(stage=1, tensor_parallel_size=2, **BUCKETS), replicas=1),
        "json": fit("json", AzureMLDeepSpeedStrategy(config=JSON)),
        "validated": validate(checkpoint("stage_3", WORLD, 1)),
        "refused": refusal(checkpoint("ddp", WORLD, 1)),
        "slices_refused": refusal(checkpoint("tp", WORLD, 1)),
    }


def memory() -> dict[str, int]:
    return {
        "bytes_ddp": measure(AzureMLDDPStrategy()),
        "bytes_float32": measure(AzureMLDeepSpeedStrategy(config=JSON)),
        "bytes_bf16": measure(AzureMLDeepSpeedStrategy(config=JSON), precision="bf16-mixed"),
    }


def measure(strategy: Strategy, **arguments: Any) -> int:
    weight = Weight()
    trainer = quiet_trainer(strategy=strategy, max_steps=2, callbacks=[weight], **STEP, **arguments)
    trainer.fit(tiny_gpt(128), batches_of(GLOBAL_BATCH // WORLD // STEP["accumulate_grad_batches"]))
    return weight.bytes


PARTS = {"one_process": one_process, "two_processes": two_processes, "one_process_again": one_process_again}
results = PARTS[sys.argv[1]]()
report(torch.distributed.get_rank(), **results)
torch.distributed.destroy_process_group()
