"""Trainings in which some parameters do not train by right or by fault: what each rank says, for one strategy."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from tests.multiprocess.scripts.apart_copies import LAST, STRATEGIES, Staged
from tests.multiprocess.scripts.common import Regression, loader, quiet_trainer, report
from tests.strategies.replica_check.test_updates import AccumulatesItself, NoRate, NotInOptimizer, Quiet, Warming
from torch import nn

from azureml_strategy.strategies import AzureMLDeepSpeedStrategy, PipelineStrategy


class Remembering(torch.optim.SGD):
    """Steps the parameters that it was made with, whatever its groups hold since."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self._own = [each for group in self.param_groups for each in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for each in self._own:
            if each.grad is not None:
                each -= 0.05 * each.grad
        return loss


class Remembered(Regression):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Remembering(self.parameters(), lr=0.05)


class KeepsSome(torch.optim.SGD):
    """Leaves out groups that are marked."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None and not group["kept"]:
                    each -= 0.05 * each.grad
        return loss


class Kept(Regression):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [{"params": self.network[i].parameters(), "kept": i == 2} for i in (0, 2)]
        return KeepsSome(groups, lr=0.05)


class StagedPutBack(Staged):
    """The last layer's bias stays, on the stage that has it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if isinstance(self.second, nn.Linear):  # nothing stands for it on other stages
            with torch.no_grad():
                self.second.bias.zero_()

    def on_train_batch_end(self, *_: Any) -> None:
        self.on_train_batch_start(None, 0)


class StagedNotGiven(Staged):
    def configure_optimizers(self) -> Any:
        weights = [each.weight for each in (self.first, self.second) if isinstance(each, nn.Linear)]
        return torch.optim.SGD(weights, lr=0.05)


QUIET: dict[str, Callable[[], LightningModule]] = {
    "all train": Regression,
    "some need not": Quiet,
    "rate of 0": NoRate,
    "rising rate": Warming,
    "accumulates itself": AccumulatesItself,
}
STAYING: dict[str, Callable[[], LightningModule]] = {
    "remembered": Remembered,
    "second group": Kept,
    "not in the optimizer": NotInOptimizer,
}
OF_STAGES: dict[str, Callable[[], LightningModule]] = {
    "all train": Staged,
    "put back": StagedPutBack,
    "not in the optimizer": StagedNotGiven,
}
CHOSEN = {
    **{name: STRATEGIES[name] for name in ("ddp", "zero 1", "zero 2", "zero 3", "fsdp2")},
    "zero 3, bf16": partial(AzureMLDeepSpeedStrategy, stage=3),
    "zero 2, offload": partial(AzureMLDeepSpeedStrategy, stage=2, offload_optimizer=True),
    "pipeline": partial(PipelineStrategy, num_stages=LAST + 1, micro_batches=2),
    "pipeline, bf16": partial(PipelineStrategy, num_stages=LAST + 1, micro_batches=2),
}


def said_in(strategy: str, module: LightningModule, lines: list[str]) -> tuple[int, list[str]]:
    lines.clear()
    precision = "bf16-mixed" if "bf16" in strategy else "32-true"
    trainer: Trainer = quiet_trainer(
        strategy=CHOSEN[strategy](), max_steps=9, max_epochs=9, devices=LAST + 1, precision=precision
    )
    trainer.fit(module, loader(4))
    return trainer.global_rank, [each for each in lines if "REPLICA_CHECK" in each]


def main() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("azureml_strategy").addHandler(handler)
    strategy, found, rank = sys.argv[1], {}, 0
    for name, module in (OF_STAGES if "pipeline" in strategy else {**QUIET, **STAYING}).items():
        rank, found[name] = said_in(strategy, module(), lines)
    report(rank, **found)


if __name__ == "__main__":
    main()
