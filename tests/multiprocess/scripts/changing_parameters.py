"""Parameters that change under azureml_ddp: left out by some ranks, unfrozen with any hook, new, in turns."""

from __future__ import annotations

import os
import weakref
from typing import Any, ClassVar

import torch
from common import Regression, loader, parameters, quiet_trainer, report
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from azureml_strategy.strategies import AzureMLDDPStrategy
from azureml_strategy.strategies.changing_parameters import CompletingDDP

BATCH, STEPS = 4, 8
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Routed(Dataset[Tensor]):
    """Rows in the order of training, whose first number tells the expert.

    One rank of two calls the first expert only, the other one the second and the third in turns.
    """

    def __init__(self) -> None:
        self.rows = torch.randn(WORLD * BATCH * STEPS, 8, generator=torch.Generator().manual_seed(2))
        rows = torch.arange(len(self.rows))
        self.rows[:, 0] = (rows % 2 * (1 + rows // (WORLD * BATCH) % 2)).float()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Experts(Regression):
    """Calls an expert only if it has rows, so that the ranks use unequal parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.ModuleList([nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1)) for _ in "abc"])

    def _loss(self, rows: Tensor) -> Tensor:
        errors = []
        for number, expert in enumerate(self.network):
            mine = rows[rows[:, 0] == number]
            if len(mine):
                errors.append(expert(mine).squeeze(1) - mine.sum(1))
        return torch.cat(errors).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01, weight_decay=0.5)


class ExpertsByHand(Experts):
    """Goes backward by itself, past the strategy, and clips what all ranks have together."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self._loss(batch).backward()
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()


class Mixed(ExpertsByHand):
    """Has two optimizers, goes backward by the strategy for one, and by itself in the closure of the other."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(self.network[0](batch).square().mean())
        first.step()

        def closure() -> Tensor:
            second.zero_grad()
            loss = self.network[1](batch).square().mean()
            loss.backward()
            return loss

        second.step(closure)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), 0.1) for each in self.network[:2]]


class Backbone(Regression):
    """Its first layer is frozen for an epoch."""

    @property
    def backbone(self) -> nn.Module:
        return self.network[0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], 0.05)


class Grows(Regression):
    """Gets another layer in its second epoch, of other values on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.more: nn.Module | None = None

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            torch.manual_seed(self.global_rank)
            self.more = nn.Linear(8, 8)
            self.optimizers(use_pl_optimizer=False).add_param_group({"params": self.more.parameters()})

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super()._loss((batch[0] if self.more is None else self.more(batch[0]), batch[1]))


class Alternates(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.network[0].requires_grad_(batch_idx % 2 == 0)
        self.network[2].requires_grad_(batch_idx % 2 == 1)


class TrainsRandomSets(Regression):
    """Trains another set of parameters in each step, the same on all ranks."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for index, parameter in enumerate(self.parameters()):
            parameter.requires_grad_(bool((1 + self.global_step % 15) >> index & 1))


class Counted(AzureMLDDPStrategy):
    """Counts the wrappers that it makes, those that it holds at most, and what a hook compresses last."""

    made = held = 0
    living: ClassVar[weakref.WeakSet[CompletingDDP]] = weakref.WeakSet()

    def _setup_model(self, model: nn.Module) -> CompletingDDP:
        self.made += 1
        made = super()._setup_model(model)
        self.living.add(made)
        self.held = max(self.held, sum(hasattr(each, "reducer") for each in self.living))
        return made


def sent_by_powersgd() -> list[int]:
    """How many numbers PowerSGD sends in each step of two sets in turn, by two trainings; 0 in its exact ones."""
    sent: list[int] = []

    def watched(state: Any, bucket: Any) -> Any:
        before = state.total_numel_after_compression
        future = powerSGD_hook(state, bucket)
        sent.append(state.total_numel_after_compression - before)
        return future

    given = PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
    strategy = AzureMLDDPStrategy(ddp_comm_state=given, ddp_comm_hook=watched)
    trainer = quiet_trainer(strategy=strategy, max_epochs=-1, max_steps=6)
    trainer.fit(Alternates(), loader(4))
    trainer.fit_loop.epoch_loop.max_steps = 12
    trainer.fit(Alternates(), loader(4))
    return sent


def fit(module: Regression, strategy: AzureMLDDPStrategy, epochs: int, data: Any, *callbacks: Any) -> Regression:
    quiet_trainer(strategy=strategy, max_epochs=epochs, callbacks=list(callbacks)).fit(module, data)
    return module


def experts() -> dict[str, list[float]]:
    in_order = DistributedSampler(Routed(), WORLD, RANK, shuffle=False)  # Lightning's own would shuffle
    trained = fit(Experts(), AzureMLDDPStrategy(), 1, DataLoader(Routed(), BATCH, sampler=in_order))
    alone = Experts()
    optimizer = alone.configure_optimizers()
    for rows in DataLoader(Routed(), WORLD * BATCH):
        optimizer.zero_grad()
        alone._loss(rows).backward()
        optimizer.step()
    return {"parameters": parameters(trained), "alone": parameters(alone)}


def by_hand() -> dict[str, list[float]]:
    """Experts that each rank trains by `loss.backward()`, with others on the other rank."""
    in_order = DistributedSampler(Routed(), WORLD, RANK, shuffle=False)
    trained = fit(ExpertsByHand(), AzureMLDDPStrategy(), 1, DataLoader(Routed(), BATCH, sampler=in_order))
    alone = Experts()
    optimizer = alone.configure_optimizers()
    for rows in DataLoader(Routed(), WORLD * BATCH):
        optimizer.zero_grad()
        alone._loss(rows).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        optimizer.step()
    return {"parameters": parameters(trained), "alone": parameters(alone)}


def mixed() -> dict[str, list[float]]:
    in_order = DistributedSampler(Routed(), WORLD, RANK, shuffle=False)
    trained = fit(Mixed(), AzureMLDDPStrategy(), 1, DataLoader(Routed(), BATCH, sampler=in_order))
    alone = Mixed()
    optimizers = alone.configure_optimizers()
    for rows in DataLoader(Routed(), WORLD * BATCH):
        for network, optimizer in zip(alone.network, optimizers, strict=False):
            optimizer.zero_grad()
            network(rows).square().mean().backward()
            optimizer.step()
    return {"parameters": parameters(trained), "alone": parameters(alone)}


def unfrozen(**arguments: Any) -> list[float]:
    unfreezing = BackboneFinetuning(1, lambda epoch: 1.0, backbone_initial_ratio_lr=1.0)
    return parameters(fit(Backbone(), AzureMLDDPStrategy(**arguments), 4, loader(4), unfreezing))


def main() -> None:
    strategy = Counted()
    fit(Alternates(), strategy, 2, loader(4))
    random = Counted()
    fit(TrainsRandomSets(), random, 2, loader(4))
    found = {
        "made": strategy.made,
        "held": [strategy.held, random.held],
        "sent by PowerSGD": sent_by_powersgd(),
        "grown": parameters(fit(Grows(), AzureMLDDPStrategy(), 2, loader(4))),
        "unfrozen": {
            "plain": unfrozen(),
            "copies": unfrozen(gradient_as_bucket_view=False),
            "static_graph": unfrozen(static_graph=True),
            "find_unused": unfrozen(find_unused_parameters=True),
            "bf16": unfrozen(gradient_compression="bf16"),
            "powersgd": unfrozen(gradient_compression="powersgd", bucket_cap_mb=0.001),
        },
        "experts": experts(),
        "by hand": by_hand(),
        "mixed": mixed(),
    }
    report(RANK, **found)


if __name__ == "__main__":
    main()
