"""What Lightning's features see and do under azureml_local_sgd."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import torch
from common import Regression, loader, parameters, quiet_trainer, report
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, EarlyStopping, LearningRateFinder
from replicas import Case, Replica, train, values
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from azureml_strategy.strategies.local_sgd import AzureMLLocalSGDStrategy, GrowingPeriod, QuadraticPeriod, refusals

RANK = int(os.environ["RANK"])
ADAMW: dict[str, Any] = {"optimizer": torch.optim.AdamW, "learning_rate": 0.02, "batch_norm": True}


def validation() -> dict[str, Any]:
    """The same training with and without it; validations fall into the middle of a period, and on its end."""
    rules = {"period": 4, "fragments": 2, "delay": 1, "outer_learning_rate": 0.7}
    return {
        "validated": train(Case(rules, {"val_check_interval": 3}, ADAMW)),
        "not validated": train(Case(rules, {}, ADAMW)),
        "plain": train(Case({"period": 4}, {"val_check_interval": 4}, ADAMW)),
    }


class Logged(Replica):
    """Logs its loss, and the mean of it over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[float, float]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("own", loss, on_step=True, on_epoch=False)
        self.log("mean", loss, sync_dist=True, on_step=True, on_epoch=False)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        metrics = self.trainer.callback_metrics
        self.logged.append((float(metrics["own"]), float(metrics["mean"])))


def logging() -> dict[str, Any]:
    module = Logged()
    quiet_trainer(strategy="azureml_local_sgd", max_epochs=4).fit(module, loader(4))
    return {"logged": module.logged}


def early_stopping() -> dict[str, Any]:
    """Nothing is progress enough after the first validation, in the middle of a period."""
    stopping = EarlyStopping("val_loss", patience=1, min_delta=1e9)
    case = Case({"period": 16}, {"val_check_interval": 3})
    trained = train(case, stopping)
    return {"steps": trained["steps"], "final": trained["final"], "best": float(stopping.best_score)}


class Pretrained(Replica):
    """A backbone that is frozen at first, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = self.network[0], self.network[1:]
        del self.network

    def loss(self, rows: Tensor) -> Tensor:
        rows = rows.double()
        return (self.head(self.backbone(rows)).squeeze(1) - rows.sum(dim=1)).pow(2).mean()

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


class Backbones(Callback):
    def __init__(self) -> None:
        self.after: list[list[float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.after.append(parameters(pl_module.backbone))


def finetuning() -> dict[str, Any]:
    """The backbone joins at the second epoch, in the middle of a period of five: step 8 of 24."""
    results = {}
    for name, rules in {"plain": {}, "diloco": {"outer_learning_rate": 0.7, "fragments": 2}}.items():
        noted = Backbones()
        unfreezing = BackboneFinetuning(1, lambda epoch: 1.0, backbone_initial_ratio_lr=0.5)
        strategy = AzureMLLocalSGDStrategy(period=6, **rules)
        trainer = quiet_trainer(strategy=strategy, max_epochs=3, callbacks=[unfreezing, noted])
        trainer.fit(Pretrained(), loader(4))
        results[name] = noted.after
    return results


def half_precision() -> dict[str, Any]:
    """Of a module that knows nothing of the strategy, in float32."""
    results = {}
    for precision in ("bf16-mixed", "32-true"):
        module = Regression()
        trainer = quiet_trainer(strategy="azureml_local_sgd", max_epochs=12, precision=precision)
        trainer.fit(module, loader())
        kinds = sorted({str(parameter.dtype) for parameter in module.parameters()})
        results[precision] = {"losses": module.losses, "parameters": parameters(module), "kinds": kinds}
    return results


def periods() -> dict[str, Any]:
    """Which of 24 steps leave the replicas with the same weights."""
    growing = GrowingPeriod(first=1, factor=2, every=6, most=4)
    quadratic = QuadraticPeriod(alpha=0.08, least=1, most=6)  # 0.05 of learning rate, halved twice
    return {
        "growing": train(Case({"period": growing}))["weights"],
        "quadratic": train(Case({"period": quadratic}, {}, {"schedule": 8}))["weights"],
        "own": train(Case({"period": lambda step, learning_rate: 3 + step % 2, "warmup_steps": 2}))["weights"],
    }


class Counter(nn.Module):
    """A whole number and a buffer that is not saved, besides weights that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(8), persistent=False)
        self.register_buffer("mask", torch.full((2,), torch.finfo(torch.float32).min))
        self.register_buffer("statistic", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.statistic.fill_(RANK)
            self.seen += rows.detach().mean(0)
        return self.second(torch.tanh(self.first(rows))).sum(1)


class Unaware(LightningModule):
    """Shared weights, frozen ones, an unused one, buffers of all kinds; nothing here knows of replicas."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(RANK)  # as Lightning's DDP, the strategy gives all ranks those of rank 0
        self.network = Counter()
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return (self.network(batch[0]) - batch[0].sum(1)).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Spread(Callback):
    """How far the ranks' parameters are apart after each step; a collective of the test's own."""

    def __init__(self) -> None:
        self.spread: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        own = torch.tensor(parameters(pl_module))
        ranks = [torch.empty_like(own) for _ in range(trainer.world_size)]
        torch.distributed.all_gather(ranks, own)
        self.spread.append(float(max((each - own).abs().max() for each in ranks)))


def unaware() -> dict[str, Any]:
    module, spread = Unaware(), Spread()
    strategy = AzureMLLocalSGDStrategy(period=4)
    quiet_trainer(strategy=strategy, max_epochs=3, callbacks=[spread]).fit(module, loader(4))
    network = module.network
    buffers = {"steps": int(network.steps), "mask": network.mask.tolist(), "statistic": float(network.statistic)}
    return {"spread": spread.spread, **buffers, "final": values(module)}


class Followed(Regression):
    """A copy of its layers follows them, and is not trained itself."""

    def __init__(self) -> None:
        super().__init__()
        self.follower = copy.deepcopy(self.network).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for mine, followed in zip(self.follower.parameters(), self.network.parameters(), strict=True):
                mine.data = mine.data.lerp(followed, 0.3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.network.parameters(), lr=self.learning_rate)


class LastFollower(Callback):
    own: list[float]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.own = parameters(pl_module.follower)


def follower() -> dict[str, Any]:
    """What each replica's follower was at the end, and what became of it."""
    module, last = Followed(), LastFollower()
    quiet_trainer(strategy=AzureMLLocalSGDStrategy(period=5), callbacks=[last], max_epochs=1).fit(module, loader(4))
    return {"own": last.own, "final": parameters(module.follower)}


class Adapter:
    """As `read_hcas` tells of InfiniBand."""

    name, usable = "mlx5_ib0", True


def evaluations() -> dict[str, Any]:
    """`validate`, `test` and `predict` outside of a fit, also where a fit would be refused."""
    read_hcas, refusals.read_hcas = refusals.read_hcas, lambda: (Adapter(),)
    try:
        refused = refusal(loader(4))
        module = Regression()
        trainer = quiet_trainer(strategy="azureml_diloco")
        validated = trainer.validate(module, loader(), verbose=False)
        tested = trainer.test(module, loader(), verbose=False)
        predicted = trainer.predict(module, DataLoader(loader().dataset, batch_size=8))
    finally:
        refusals.read_hcas = read_hcas
    return {
        "refused": refused,
        "validated": validated,
        "tested": tested,
        "predicted": sum(len(each) for each in predicted),
    }


def learning_rate() -> dict[str, Any]:
    """A fit that begins with a search for the learning rate, and one that has it from the start."""
    rules = {"period": 6, "warmup_steps": 3, "outer_learning_rate": 0.7, "fragments": 2, "delay": 1}
    finder = LearningRateFinder(num_training_steps=20)
    searched = train(Case(rules), finder)
    found = finder.optimal_lr.suggestion()
    return {"searched": searched, "given": train(Case(rules, {}, {"learning_rate": found})), "found": found}


class Uneven(IterableDataset[tuple[Tensor, Tensor]]):
    """Of which the second rank has more, and nobody knows how many."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for row in range(20 + 8 * RANK):
            yield torch.ones(8), torch.tensor(row)


def uneven() -> dict[str, str]:
    """What a fit says to ranks of 5 and 7 batches, known or not; then a fit of even ones, which goes well."""
    rows = loader(4).dataset
    known = DataLoader(Subset(rows, range(20 + 8 * RANK)), batch_size=4)
    unknown = DataLoader(Uneven(), batch_size=4)
    told = {
        "known": refusal(known, period=4),
        "at the next epoch": refusal(unknown, period=8),
        "at an exchange": refusal(unknown, period=6),
        "at an arrival": refusal(unknown, period=6, delay=2, max_steps=-1),
        "at the end": refusal(unknown, period=16, max_epochs=1, limit_train_batches=16),
        "even": refusal(unknown, period=4, limit_train_batches=5),
        "one step for a try": refusal(loader(4), fast_dev_run=True),
    }
    return {name: words.partition("\n")[0] for name, words in told.items()}


def refusal(batches: Any, period: int = 16, delay: int = 0, **arguments: Any) -> str:
    strategy = AzureMLLocalSGDStrategy(period=period, delay=delay)
    settings = {"max_epochs": 4, "use_distributed_sampler": False, **arguments}
    try:
        quiet_trainer(strategy=strategy, **settings).fit(Regression(), batches)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


PARTS = (
    validation,
    logging,
    early_stopping,
    finetuning,
    follower,
    half_precision,
    periods,
    unaware,
    evaluations,
    uneven,
    learning_rate,
)
results = {part.__name__: part() for part in PARTS}
report(torch.distributed.get_rank(), **results)
torch.distributed.destroy_process_group()
