from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.isolation import CapturedResult, IsolatedCallback, run_user_code


class Fragile(IsolatedCallback):
    """Raises what it is told to, and counts its calls."""

    switch = "AZUREML_STRATEGY_FRAGILE"

    def __init__(self, raised: BaseException | None = None) -> None:
        self.raised = raised
        self.calls: list[str] = []
        self.given_up: list[Trainer | None] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.calls.append("setup")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.calls.append("batch")
        if self.raised is not None:
            raise self.raised

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.calls.append("end")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run_user_code(self._users_code)

    def _users_code(self) -> None:
        raise ValueError("the user's")

    def _give_up(self, trainer: Trainer | None) -> None:
        self.given_up.append(trainer)
        raise OSError("and this fails, too")


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)


def call(callback: Fragile, trainer: Trainer, hook: str, *arguments: Any) -> None:
    getattr(callback, hook)(trainer, None, *arguments)


def test_a_fault_is_one_warning_and_the_end_of_the_callback_for_this_run(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    callback = Fragile(KeyError("no such thing"))
    for _ in range(2):
        call(callback, trainer, "on_train_batch_start", None, 0)
    call(callback, trainer, "on_train_end")
    assert callback.calls == ["batch"]
    assert callback.given_up == [trainer]
    (warning,) = [each for each in caplog.records if each.levelname == "WARNING"]
    for words in ("Fragile.on_train_batch_start", "AZUREML_STRATEGY_FRAGILE=off", "Traceback", "raise self.raised"):
        assert words in warning.getMessage()
    call(callback, trainer, "setup", "fit")
    call(callback, trainer, "on_train_end")
    assert callback.calls == ["batch", "setup", "end"], "the next run begins anew"


@pytest.mark.parametrize("intended", [LaunchError("half right"), SIGTERMException(143), KeyboardInterrupt()])
def test_what_ends_a_run_on_purpose_passes(trainer: Trainer, intended: BaseException) -> None:
    callback = Fragile(intended)
    with pytest.raises(type(intended)):
        call(callback, trainer, "on_train_batch_start", None, 0)
    assert callback.given_up == []


def test_what_the_users_code_raises_inside_of_it_passes(trainer: Trainer) -> None:
    with pytest.raises(ValueError, match="the user's"):
        call(Fragile(), trainer, "on_fit_end")


def test_an_attempt_keeps_its_fault_until_the_others_know() -> None:
    assert CapturedResult(lambda: 3).value == 3
    failed = CapturedResult(lambda: {}["key"])
    assert failed.value is None
    with pytest.raises(KeyError):
        failed.reraise()
    with pytest.raises(LaunchError):
        CapturedResult(refuse)


def refuse() -> None:
    raise LaunchError("half right")
