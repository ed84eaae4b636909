"""A tiny GPT in a pipeline, under DDP and on one process: losses, weights, logs, checkpoints, memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from common import live_bytes, quiet_trainer, report
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.checkpoint.formats import consolidate_pipeline
from azureml_strategy.models import ChainLayer, GPTConfig, LanguageModel
from azureml_strategy.strategies import AzureMLDDPStrategy, PipelineStrategy

SEQUENCES, LENGTH, TOKENS = 48, 16, 64
GLOBAL_BATCH = 16  # sequences of a step over all replicas: 3 steps an epoch, and 2 epochs
VALIDATED = 22  # sequences: the last batch is smaller than the number of micro-batches divides
FOLDER = Path(os.environ["RESULTS"]).parent
WORLD = int(os.environ["WORLD_SIZE"])
ALL = sys.argv[2] == "all"  # or one of each kind
STEPPED = {"gradient_clip_val": 0.5}


class Watch(Callback):
    """Notes the loss of each batch, when hooks are called, and what tensors take up before the fifth step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.global_steps: list[int] = []
        self.hooks: list[str] = []
        self.read: list[int] = []
        self.gradient_norms: list[float] = []
        self.before = live_bytes()
        self.bytes = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        self.global_steps.append(trainer.global_step)
        self.read += batch[0][:, 0].tolist()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.hooks.append("after_backward")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.hooks.append("before_optimizer_step")
        gradients = [each.grad.norm() for each in pl_module.parameters() if each.grad is not None]
        if gradients:
            self.gradient_norms.append(float(torch.stack(gradients).norm()))
        if len(self.losses) == 4:
            self.bytes = live_bytes() - self.before


def tiny_gpt(width: int = 32, layers: int = 2) -> LanguageModel:
    network = GPTConfig(TOKENS, LENGTH, layers, width, heads=4, mlp_width=2 * width)
    return LanguageModel(network, learning_rate=5e-3, warmup_steps=2, seed=3)


class ByEpoch(LanguageModel):
    """Plain SGD whose rate falls after the epoch, and two more figures of each step."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(TOKENS, LENGTH, 2, 32, 4, 64, tied=False), seed=3)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        logits = self(batch[0])
        loss = self.pipeline_loss(logits, batch[1])
        hits = (logits.argmax(-1) == batch[1]).float()
        self.log("hits", hits.sum(), reduce_fx="sum", on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"best": hits.mean(-1).max()}, reduce_fx="max", prog_bar=True)
        return {"loss": loss}

    def configure_optimizers(self) -> dict[str, Any]:
        sgd = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        return {"optimizer": sgd, "lr_scheduler": torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.1)}


def batches_of(size: int, sequences: int = SEQUENCES, **arguments: Any) -> DataLoader[tuple[Tensor, ...]]:
    tokens = torch.randint(TOKENS, (sequences, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    tokens[:, 1::2] = tokens[:, 0:-1:2]  # something to learn
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:].clone()), batch_size=size, **arguments)


def fit(
    name: str,
    strategy: Strategy,
    module: LanguageModel | None = None,
    resume: str | None = None,
    replicas: int = 1,
    callbacks: tuple[Callback, ...] = (),
    **arguments: Any,
) -> dict[str, Any]:
    """Train two epochs, or only the second; each leaves a checkpoint in a folder of this name."""
    watch, module = Watch(), module or tiny_gpt()
    saver = ModelCheckpoint(FOLDER / name, "{epoch}", monitor="val/loss", save_top_k=-1)
    trainer = quiet_trainer(
        **{
            "strategy": strategy,
            "max_epochs": 2,
            "callbacks": [watch, saver, *callbacks],
            "enable_checkpointing": True,
            "num_sanity_val_steps": 1,
            "log_every_n_steps": 3,
            **arguments,
        }
    )
    loaders = batches_of(GLOBAL_BATCH // replicas), batches_of(7, VALIDATED)
    trainer.fit(module, *loaders, ckpt_path=FOLDER / resume / "epoch=0.ckpt" if resume else None)
    metrics = {metric: float(value) for metric, value in trainer.callback_metrics.items()}
    best = Path(saver.best_model_path).name
    return {
        **{key: vars(watch)[key] for key in KEPT},
        "metrics": metrics,
        "epochs": trainer.current_epoch,
        "best": best,
    }


KEPT = ("losses", "global_steps", "hooks", "read", "gradient_norms", "bytes")


def weights(name: str, module: LanguageModel | None = None) -> list[float]:
    """The trained weights, loaded into a module that is not cut."""
    module = module or tiny_gpt()
    module.configure_model()
    checkpoint = FOLDER / name / "epoch=1.ckpt"
    single = torch.load(checkpoint)["state_dict"] if checkpoint.is_file() else consolidate_pipeline(checkpoint)
    module.load_state_dict(single)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


def compare(name: str, strategy: Strategy, replicas: int = 1, **arguments: Any) -> dict[str, Any]:
    return {**fit(name, strategy, replicas=replicas, **STEPPED, **arguments), "weights": weights(name)}


def one_process() -> dict[str, Any]:
    """The oracle: DDP of one rank, which reads in one batch what several read in theirs; and one stage."""
    results = {
        "plain": compare("plain", AzureMLDDPStrategy()),
        "one stage": compare("one_stage", PipelineStrategy()),
        "one stage again": fit("one_stage_again", PipelineStrategy(), resume="one_stage", **STEPPED),
        "one stage, by epoch": fit("one_stage_sgd", PipelineStrategy(), ByEpoch()),
        "by epoch": {**fit("by_epoch", AzureMLDDPStrategy(), ByEpoch()), "weights": weights("by_epoch", ByEpoch())},
        "wide": fit("wide", AzureMLDDPStrategy(), tiny_gpt(64, 6)),
        "chain": chain(AzureMLDDPStrategy()),
    }
    if ALL:
        strategy = PipelineStrategy(num_stages=1, zero_stage=1, micro_batches=2)
        results["one stage, zero"] = compare("one_stage_zero", strategy)
        results["one stage, bf16"] = fit("one_stage_bf16", PipelineStrategy(), precision="bf16-mixed", **STEPPED)
    return results


def two_processes() -> dict[str, Any]:
    results = {
        "ddp": compare("ddp", AzureMLDDPStrategy(), replicas=2),
        "pipeline": compare("pipeline", PipelineStrategy()),
        "by kind": compare(
            "by_kind", PipelineStrategy(partition="type:block", micro_batches=8, activation_checkpointing=1)
        ),
        "bf16": fit("bf16", PipelineStrategy(), precision="bf16-mixed", **STEPPED),
        "by epoch": fit("sgd", PipelineStrategy(), ByEpoch(), logger=CSVLogger(FOLDER / "logs")),
        "wide": fit("wide_pipeline", PipelineStrategy(), tiny_gpt(64, 6)),
        "chain": chain(PipelineStrategy(partition="uniform")),
    }
    if ALL:
        results["zero"] = compare("zero", PipelineStrategy(zero_stage=1, micro_batches=2))
    results["by epoch"]["weights"] = weights("sgd", ByEpoch())
    results["pipeline again"] = fit("pipeline_again", PipelineStrategy(), resume="pipeline", **STEPPED)
    results["stopped"] = fit(
        "stopped", PipelineStrategy(), max_epochs=5, callbacks=(EarlyStopping("val/loss", patience=1, min_delta=9.0),)
    )
    return {**results, "evaluated": evaluated(), "max_steps": max_steps(), "refused": refused()}


def chain(strategy: Strategy) -> list[float]:
    watch = Watch()
    quiet_trainer(strategy=strategy, max_epochs=2, callbacks=[watch]).fit(Chain(), batches_of(GLOBAL_BATCH))
    return watch.losses


def evaluated() -> dict[str, Any]:
    """The same module after fit, one from a checkpoint, and one that a stage has only parts of."""
    module = tiny_gpt()
    trainer = quiet_trainer(strategy=PipelineStrategy(), max_epochs=1)
    trainer.fit(module, batches_of(GLOBAL_BATCH))
    after_fit = trainer.test(module, batches_of(7, VALIDATED), verbose=False)[0]
    validated = quiet_trainer(strategy=PipelineStrategy()).validate(module, batches_of(7, VALIDATED), verbose=False)[0]
    from_checkpoint = quiet_trainer(strategy=PipelineStrategy(zero_stage=1)).test(
        tiny_gpt(), batches_of(7, VALIDATED), ckpt_path=FOLDER / "pipeline" / "epoch=1.ckpt", verbose=False
    )[0]
    bf16 = quiet_trainer(strategy=PipelineStrategy(), precision="bf16-mixed").test(
        tiny_gpt(), batches_of(7, VALIDATED), ckpt_path=FOLDER / "bf16" / "epoch=1.ckpt", verbose=False
    )[0]
    return {"bf16": bf16, "after fit": after_fit, "validated": validated, "from checkpoint": from_checkpoint}


def max_steps() -> int:
    trainer = quiet_trainer(strategy=PipelineStrategy(), max_steps=5, max_epochs=-1)
    trainer.fit(tiny_gpt(), batches_of(GLOBAL_BATCH))
    return trainer.global_step


class Transposed(nn.Module):
    """A layer whose output does not lie in memory in its own order."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, rows: Tensor) -> Tensor:
        return self.module(rows).t().contiguous().t()


class Chain(LightningModule):
    """Layers of odd kinds: functions, a tuple between the stages, transposed memory, and parameters that are frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        frozen = nn.Linear(8, 8).requires_grad_(False)
        self.first, self.last = Transposed(nn.Sequential(nn.Linear(16, 8), frozen)), nn.Linear(8, TOKENS)

    def pipeline_layers(self) -> list[ChainLayer]:
        return [
            ChainLayer(lambda: self.first, "first", "linear"),
            ChainLayer(lambda: self._pair, "pair", "function"),
            ChainLayer(lambda: self._add, "add", "function"),
            ChainLayer(lambda: self.last, "last", "linear"),
        ]

    def _pair(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows, rows.tanh()

    def _add(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]

    def pipeline_batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0] / TOKENS, batch[1][:, 0]

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self._add(self._pair(self.first(rows))))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        rows, targets = self.pipeline_batch(batch)
        return nn.functional.cross_entropy(self(rows), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def refused() -> dict[str, str]:
    """What is wrong with each run, as its error says."""
    network = tiny_gpt().network
    cases: dict[str, tuple[dict[str, Any], LightningModule, Any, dict[str, Any]]] = {
        "stages": ({"num_stages": 3}, tiny_gpt(), {}, {}),
        "batch": ({"micro_batches": 3}, tiny_gpt(), {}, {}),
        "last batch": ({}, tiny_gpt(), {"sequences": 42}, {}),
        "accumulation": ({}, tiny_gpt(), {}, {"accumulate_grad_batches": 2}),
        "fp16": ({}, tiny_gpt(), {}, {"precision": "16-mixed"}),
        "kind": ({"partition": "type:attention"}, tiny_gpt(), {}, {}),
        "layout": ({"partition": "uniform"}, tiny_gpt(), {}, {}),
        "other module": ({}, LanguageModel(network.__class__(TOKENS, LENGTH, 3, 32, 4, 64)), {}, {}),
    }
    return {name: refusal(*case, resume=name in ("layout", "other module")) for name, case in cases.items()}


def refusal(strategy: dict[str, Any], module: LightningModule, data: Any, trainer: dict[str, Any], resume: bool) -> str:
    try:
        quiet_trainer(strategy=PipelineStrategy(**strategy), **trainer).fit(
            module, batches_of(GLOBAL_BATCH, **data), ckpt_path=FOLDER / "pipeline" / "epoch=0.ckpt" if resume else None
        )
    except ValueError as error:
        return str(error)
    return "nothing"


def four_processes() -> dict[str, Any]:
    results = {
        "plain": compare("two_by_two", PipelineStrategy(micro_batches=2), replicas=2),
        "zero": compare("two_by_two_zero", PipelineStrategy(micro_batches=2, zero_stage=1), replicas=2),
        "uneven": uneven(),
    }
    if ALL:
        results["four stages"] = compare("four_stages", PipelineStrategy(num_stages=4, partition="uniform"))
    return results


def uneven() -> float:
    """Validation of replicas whose only batches differ in size, so that one has a smaller last micro-batch."""
    sequences = 5 - int(os.environ["RANK"]) % 2
    trainer = quiet_trainer(strategy=PipelineStrategy(), use_distributed_sampler=False)
    return trainer.validate(tiny_gpt(), batches_of(7, sequences), verbose=False)[0]["val/loss"]


PARTS = {"one_process": one_process, "two_processes": two_processes, "four_processes": four_processes}
results = PARTS[sys.argv[1]]()
report(torch.distributed.get_rank(), **results)
torch.distributed.destroy_process_group()
