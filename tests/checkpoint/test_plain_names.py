"""A checkpoint runs no code, whatever it names, and a restart still finds the functions of its own script."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, Flag
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from tests.checkpoint.saving import QUIET
from tests.memory import peak_of
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from azureml_strategy.checkpoint.allowed_types import NameRefusedError, Names
from azureml_strategy.checkpoint.checkpoint_io import AtomicCheckpointIO
from azureml_strategy.checkpoint.encoding import decode, encode, require_decodable
from azureml_strategy.checkpoint.serialization import (
    PlainDataStrategy,
    UnrestorableStateError,
    from_plain,
    saved_hyperparameters,
    to_plain,
)

ran: list[Any] = []


def run(*arguments: Any) -> float:
    """What an attacker calls."""
    ran.append(arguments)
    return 0.1


def halve(step: int, by: float = 2.0) -> float:
    return by**-step


class Point(NamedTuple):
    x: int


@dataclass
class Best:
    score: float


@dataclass
class Calls:
    to: Any

    def __call__(self) -> None:
        ran.append(self)


class Plain:
    def __init__(self) -> None:
        self.size = 1


class Colour(Enum):
    RED = 1


class Parts(Flag):
    HEAD = 1
    TAIL = 2


def named(*name: str) -> list[Any]:
    return ["reference", list(name)]


RUN = partial(run, "mine")
REFUSED = {
    "function": named("builtins", "eval"),
    "function of another module": named("os", "system"),
    "class": named("subprocess", "Popen"),
    "method": named("subprocess", "Popen.wait"),
    "function of the tests": named(__name__, "run"),
    "torch's loader": named("torch", "load"),
    "torch's file": named("torch", "from_file"),
    "torch's hub": named("torch.hub", "load"),
    "torch's class": named("torch.nn.utils.parametrize", "ParametrizationList"),
    "not imported": named("antigravity", "fly"),
    "partial": ["partial", [named("builtins", "eval"), ["plain", ("1",)], ["plain", {}]]],
    "partial of a class": ["partial", [named("subprocess", "Popen"), ["plain", (["true"],)], ["plain", {}]]],
    "factory": ["defaultdict", ["tuple", [named("subprocess", "Popen"), ["plain", {}]]]],
    "object": ["object", [named("subprocess", "CompletedProcess"), []]],
    "object that is called": ["object", [named(__name__, "Calls"), []]],
    "object of the tests": ["object", [named(__name__, "Plain"), []]],
    "enum of none": ["enum", [named("not.imported", "Colour"), ["RED"]]],
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_may_do_anything_is_refused(kind: str) -> None:
    before = set(sys.modules)
    with pytest.raises(NameRefusedError, match=r"add_safe_globals\(\[.*weights_only=False"):
        decode(REFUSED[kind])
    assert set(sys.modules) == before


HARMLESS = [
    *(torch.relu, nn.functional.gelu, nn.functional.cross_entropy, torch.sum, torch.linalg.norm),
    *(nn.Linear, nn.GELU, torch.optim.AdamW, torch.optim.lr_scheduler.CosineAnnealingLR, int, list, sum),
    *(Best(0.5), Point(3), Colour.RED, Parts.HEAD | Parts.TAIL),
]


@pytest.mark.parametrize("value", HARMLESS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_what_only_computes_or_holds_data_needs_no_run(value: Any) -> None:
    assert decode(encode({"deep": [value]}))["deep"] == [value]


def test_a_registered_function_may_be_named() -> None:
    with torch.serialization.safe_globals([run]):
        assert decode(encode(run)) is run
    with pytest.raises(NameRefusedError):
        decode(encode(run))


def test_a_partial_of_a_run_is_taken_with_its_own_arguments_only() -> None:
    names = Names([Namespaced(loss=RUN, deep=[{"it": Plain()}])])
    assert decode(encode(partial(run, "mine")), names) is RUN
    assert decode(encode(run), names) is run
    assert type(decode(encode(Plain()), names)) is Plain
    with pytest.raises(NameRefusedError, match="with arguments that no partial of this run has"):
        decode(encode(partial(run, "theirs")), names)
    assert ran == []


class Namespaced:
    def __init__(self, **fields: Any) -> None:
        self.__dict__ |= fields


class Scheduler(LRScheduler):
    """A user's, which keeps its function in its state, as torch's own do not."""

    def __init__(self, optimizer: Any, rate: Callable[[int], float]) -> None:
        self.rate = rate
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [self.rate(self.last_epoch) for _ in self.optimizer.param_groups]


class Rule:
    """A user's, called by a scheduler of torch's inside of another."""

    def __init__(self) -> None:
        self.function = halve

    def __call__(self, step: int) -> float:
        return self.function(step)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.function, self.plain = halve, Plain()


def test_what_a_part_of_the_module_or_of_a_scheduler_holds_may_be_named() -> None:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    lr = torch.optim.lr_scheduler
    inner = lr.LambdaLR(optimizer, Rule())
    chain = lr.SequentialLR(optimizer, [inner, lr.ExponentialLR(optimizer, 0.9)], [2])
    module = LightningModule()
    module.part = nn.Sequential(Part())
    for run_of, value in (([chain], chain.state_dict()), ([module], {"f": halve, "kind": Plain})):
        assert decode(encode(value), Names(run_of)) == value
    assert decode(encode(Plain()), Names([module])).size == 1


def test_a_long_list_does_not_hide_what_else_a_run_holds() -> None:
    module = Namespaced(samples=[("name", str(i), [i]) for i in range(30_000)], deep={"a": {"b": {"c": halve}}})
    assert decode(encode(halve), Names([module])) is halve


class Ours(PlainDataStrategy, SingleDeviceStrategy):
    """What each of our strategies does with a checkpoint, on one device."""


class Keeps(Callback):
    def __init__(self, value: Any) -> None:
        self.value, self.given = value, None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given = state_dict["value"]


class Scheduled(LightningModule):
    def __init__(self, rate: Callable[[int], float]) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.make_rate = lambda: rate  # held by the scheduler alone
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [Scheduler(optimizer, self.make_rate())]


class Unsaved(Scheduled):
    def __init__(self, rate: Callable[[int], float]) -> None:
        LightningModule.__init__(self)
        self.make_rate = lambda: rate
        self.layer = nn.Linear(1, 1)


def fit(folder: Path, module: LightningModule, kept: Any, epochs: int, **how: Any) -> Trainer:
    """Train one epoch more than before, and write `last.ckpt`."""
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        strategy=Ours("cpu"),
        plugins=[AtomicCheckpointIO()],
        callbacks=[kept if isinstance(kept, Keeps) else Keeps(kept)],
        **{**QUIET, "enable_checkpointing": False, "logger": False},
    )
    trainer.fit(module, DataLoader(torch.ones(2, 1)), **how)
    trainer.save_checkpoint(folder / "last.ckpt")
    return trainer


@pytest.mark.parametrize("rate", [halve, partial(halve, by=3.0)], ids=["function", "partial"])
@pytest.mark.parametrize("module", [Scheduled, Unsaved])
def test_a_restart_finds_the_functions_of_its_own_script(module: Any, rate: Any, tmp_path: Path) -> None:
    fit(tmp_path, module(rate), [halve, Plain], 1)
    again = fit(tmp_path, module(rate), [halve, Plain], 2, ckpt_path=tmp_path / "last.ckpt")
    assert again.lr_scheduler_configs[0].scheduler.rate is rate
    assert again.callbacks[0].given == [halve, Plain]
    assert again.optimizers[0].param_groups[0]["lr"] == rate(2)


@pytest.mark.parametrize("place", ["attribute", "method", "optimizer", "callback"])
def test_a_restart_calls_nothing_that_the_file_names(place: str, tmp_path: Path) -> None:
    ran.clear()
    fit(tmp_path, Unsaved(halve), 1, 1)
    saved = from_plain(torch.load(tmp_path / "last.ckpt", weights_only=True), Names(trusted=True))
    schedule, theirs = saved["lr_schedulers"][0], partial(run, "theirs")
    schedule |= {"attribute": {"rate": theirs}, "method": {"get_lr": theirs, "step": theirs}}.get(place, {})
    if place == "optimizer":
        saved["optimizer_states"][0]["param_groups"][0]["lr"] = theirs
    if place == "callback":
        saved["callbacks"] = {"Keeps": {"value": theirs}}
    torch.save(to_plain(saved), tmp_path / "last.ckpt")
    with pytest.raises(UnrestorableStateError, match=r"the file names .*test_plain_names\.run, .*add_safe_globals"):
        fit(tmp_path, Unsaved(halve), 1, 2, ckpt_path=tmp_path / "last.ckpt")
    assert ran == []


def test_what_is_written_is_tried_without_a_copy_of_it() -> None:
    plain = encode({"replay": [np.zeros(2**28, np.uint8)], "generator": np.random.default_rng(1)})
    with peak_of(16 * 2**20):
        require_decodable(plain, Names())
    with pytest.raises(NameRefusedError):
        require_decodable(encode({"replay": [np.zeros(2**21, np.uint8)], "run": run}), Names())


class Unheld(Keeps):
    """Its state names a function that no attribute holds."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": run}


def test_what_a_restart_will_refuse_is_told_when_it_is_written(tmp_path: Path) -> None:
    told = pytest.warns(UserWarning, match=r"A restart will not take callbacks → Unheld of .*test_plain_names\.run, ")
    with told as found:
        trainer = fit(tmp_path, Unsaved(halve), Unheld(None), 1)
        trainer.save_checkpoint(tmp_path / "again.ckpt")
    assert sum("A restart will not" in str(each.message) for each in found) == 1


def test_a_file_that_is_trusted_names_what_it_wants(tmp_path: Path) -> None:
    fit(tmp_path, Unsaved(halve), run, 1)
    with pytest.raises(UnrestorableStateError, match="callbacks → Keeps of the checkpoint cannot be restored"):
        fit(tmp_path, Unsaved(halve), 1, 2, ckpt_path=tmp_path / "last.ckpt")
    again = fit(tmp_path, Unsaved(halve), 1, 2, ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert again.callbacks[0].given is run


def test_hyperparameters_of_a_file_name_no_function_unless_it_is_trusted(tmp_path: Path) -> None:
    file = tmp_path / "plain.ckpt"
    torch.save(to_plain({"hyper_parameters": {"width": 3, "call": run, "optimizer": partial(torch.optim.SGD)}}), file)
    with pytest.warns(UserWarning, match=r"hyper_parameters → call of the checkpoint is left out.*trust_pickles=True"):
        assert saved_hyperparameters(file).keys() == {"width", "optimizer"}
    assert saved_hyperparameters(file, trust_pickles=True)["call"] is run
