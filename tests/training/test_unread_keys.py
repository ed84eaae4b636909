"""Keys that are allowed and that nothing reads are named; all others stay without a word."""

from __future__ import annotations

import logging

import pytest
from lightning.pytorch import Callback
from tests.training.conftest import Compose

from azureml_strategy.training.checks import check_config
from azureml_strategy.training.unread_keys import warn_of_unread_keys


class Watches(Callback):
    """Takes any keyword, as a user's class may."""

    def __init__(self, patience: int = 3, beta2: float = 0.9, **settings: float) -> None:
        self.settings = settings


class WatchesMore(Watches):
    def __init__(self, *, width: int = 1, **settings: float) -> None:
        super().__init__(**settings)


def watches(patience: int = 3, **settings: float) -> Watches:
    return Watches(patience, **settings)


def added(target: str, keys: str) -> str:
    return f"+callbacks.mine={{_target_: {__name__}.{target}, {keys}}}"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["+vars.rate=0.1"], "vars.rate:"),
        (["+vars.rate=0.1", "model.learning_rate=${vars.rte}", "+vars.rte=1"], "vars.rate:"),
        (["+vars={a: {b: 1, c: 2}}", "seed=${vars.a.b}"], "vars.a.c:"),
        (["+vars={a: 1, b: 2}"], "vars.a, vars.b:"),
        (["strategy=lightning_ddp", "compile=blocks"], "strategy=ddp has"),
        (["compile=whole", "strategy.compile=blocks"], "write strategy.compile=whole"),
        ([added("Watches", "patince: 3")], "callbacks.mine.patience?"),
        ([added("WatchesMore", "patince: 3")], "callbacks.mine.patience?"),
        ([added("WatchesMore", "widht: 3")], "callbacks.mine.width?"),
        ([added("watches", "patiens: 3")], "callbacks.mine.patience?"),
    ],
)
def test_what_probably_nothing_reads(
    composed: Compose, caplog: pytest.LogCaptureFixture, overrides: list[str], named: str
) -> None:
    config = composed("resnet50_ddp", *overrides)
    check_config(config)
    warn_of_unread_keys(config)
    (text,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert named in text, text


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["+vars.rate=0.1", "model.learning_rate=${vars.rate}"],
        ["+vars={a: {b: 1, c: 2}}", "+data.steps_per_epoch=${vars.a}"],
        ["+vars={a: 1, b: '${.a}'}"],
        ["+vars={a: 1}", "seed=${oc.select:vars.a,3}"],
        ["+vars={a: 1}", "seed=${vars[a]}"],
        ["+vars={a: null}"],
        ["+vars={the-rate: 0.1}", "model.learning_rate=${vars.the-rate}"],
        [added("Watches", "patience: 3, beta1: 0.8, tolerance: 2")],
        [added("Watches", "patience: 3, patient: 1")],
        [added("WatchesMore", "patience: 3, width: 1")],
    ],
)
def test_nothing_is_said_of_others(composed: Compose, caplog: pytest.LogCaptureFixture, overrides: list[str]) -> None:
    warn_of_unread_keys(composed("resnet50_ddp", *overrides))
    assert [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING] == []
