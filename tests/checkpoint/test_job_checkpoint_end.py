"""The end of a training: its last step is saved whatever it was followed by; and monitors that nobody logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from tests.checkpoint.saving import QUIET
from tests.multiprocess.scripts.noisy import Killed, Noisy, Numbers, StopAt, fit
from torch.utils.data import DataLoader

from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.checkpoint.folder import CheckpointFolder
from azureml_strategy.checkpoint.manifest import Manifest
from azureml_strategy.checkpoint.monitor import never_validates, say_unranked

pytestmark = pytest.mark.usefixtures("seeded")
# 30 batches an epoch, of which two make a step; validated after 8, 16 and 24.
BY_VALIDATION: dict[str, Any] = {"every_n_train_steps": None}


def saved(tmp_path: Path) -> list[Manifest]:
    return CheckpointFolder(tmp_path / "checkpoints").complete()


def train(
    folder: Path,
    *callbacks: Callback,
    module: LightningModule | None = None,
    data: Numbers | None = None,
    **arguments: Any,
) -> JobCheckpoint:
    saver = JobCheckpoint(folder / "checkpoints", **arguments.pop("checkpoint", {}))
    settings = {**QUIET, "accelerator": "cpu", "logger": False, "max_epochs": 1, "val_check_interval": 8, **arguments}
    trainer = Trainer(callbacks=[saver, *callbacks], **settings)
    trainer.fit(module or Noisy(), datamodule=data or Numbers())
    return saver


def test_steps_after_the_last_validation_are_saved_and_trained_on_from(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", checkpoint=BY_VALIDATION)
    fit(tmp_path / "run", max_epochs=1, checkpoint=BY_VALIDATION)
    newest, before = saved(tmp_path / "run")[:2]
    assert (newest.step, newest.reason, newest.score) == (15, "end", None)
    assert (before.step, before.reason) == (12, "epoch")
    again = fit(tmp_path / "run", checkpoint=BY_VALIDATION)
    assert again["weights"] == whole["weights"], "it was taken between two steps"


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"val_check_interval": 1.0}, [30]),  # validated after the last step: one checkpoint of it
        ({"limit_val_batches": 0}, [30]),
        ({"max_epochs": -1, "max_steps": 11, "check_val_every_n_epoch": None}, [11, 8]),
        ({"limit_train_batches": 4, "val_check_interval": None, "check_val_every_n_epoch": 2}, [4]),
        ({"max_epochs": 3, "val_check_interval": 1.0, "check_val_every_n_epoch": 2}, [90, 60]),
        ({"max_epochs": 3, "limit_train_batches": 4, "val_check_interval": 1.0, "check_val_every_n_epoch": 9}, [12, 8]),
        ({"fast_dev_run": True}, []),
        ({"max_steps": 0}, []),
    ],
)
def test_the_last_step_has_one_checkpoint(tmp_path: Path, arguments: dict[str, Any], steps: list[int]) -> None:
    saver = train(tmp_path, **arguments)
    assert [each.step for each in saved(tmp_path)[:2]] == steps
    assert saver.last_model_path == (str(tmp_path / "checkpoints" / saved(tmp_path)[0].name) if steps else "")


class _Stops(Noisy):
    """Ends the epoch as a module may, and with it the training."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 5 else None


class _SavesAtTheEnd(Callback):
    """Has the last step saved before it is due, as a notice of Azure's does."""

    def on_step_boundary(self, trainer: Trainer) -> None:
        saver = trainer.checkpoint_callback
        if trainer.global_step == 30 and isinstance(saver, JobCheckpoint):
            saver.save_now(trainer, "preempted")


def test_an_epoch_that_a_script_cuts_short(tmp_path: Path) -> None:
    train(tmp_path, module=_Stops())
    assert [each.step for each in saved(tmp_path)] == [5]


def test_a_training_that_ends_while_gradients_accumulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under DeepSpeed, which counts on over the end of an epoch: then there is no moment between two steps."""
    monkeypatch.setattr("azureml_strategy.checkpoint.loop_progress.accumulating", lambda *_, **__: True)
    train(tmp_path)
    assert [(each.step, each.reason) for each in saved(tmp_path)] == [(30, "end")]


def test_what_a_stop_has_saved_is_not_saved_again(tmp_path: Path) -> None:
    train(tmp_path, _SavesAtTheEnd(), limit_val_batches=0)
    assert [(each.step, each.reason) for each in saved(tmp_path)] == [(30, "preempted")]


def test_nothing_is_saved_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(tmp_path, StopAt(27))
    assert [each.step for each in saved(tmp_path)[:2]] == [24, 16]


def test_a_callback_that_sees_two_trainings_saves_both(tmp_path: Path) -> None:
    saver = JobCheckpoint(tmp_path / "checkpoints", every_minutes=None)
    for _ in range(2):
        trainer = Trainer(
            **QUIET, accelerator="cpu", logger=False, max_epochs=1, callbacks=[saver], limit_val_batches=0
        )
        trainer.fit(Noisy(), datamodule=Numbers())
    assert [(each.step, each.attempt) for each in saved(tmp_path)] == [(30, 2), (30, 1)]


class _LogsInTraining(Noisy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("own", float(batch_idx))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("monitor", "arguments", "before"),
    [
        ("val/loss", {"limit_val_batches": 0}, "limit_val_batches=0"),
        ("val/loss", {"max_steps": 7}, "the first would come after 8 batches, and the training ends after 7 at most"),
        (
            "val/loss",
            {"check_val_every_n_epoch": 3, "val_check_interval": 1.0, "max_epochs": 2},
            "the first would come after 90 batches, and the training ends after 60 at most",
        ),
        ("val/loss", {"data": type("Empty", (Numbers,), {"val_dataloader": lambda _: DataLoader([])})}, "are empty"),
        ("val/los", {"val_check_interval": 1.0}, ""),  # misspelt, and the training is over when that is seen
        ("val/loss", {"module": type("Unvalidated", (Noisy,), {"validation_step": LightningModule.validation_step})},
         "no validation_step"),
    ],
)  # fmt: skip
def test_a_monitor_that_is_never_logged_costs_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monitor: str, arguments: dict[str, Any], before: str
) -> None:
    arguments = {name: value() if isinstance(value, type) else value for name, value in arguments.items()}
    saver = train(tmp_path, checkpoint={"monitor": monitor}, **arguments)
    said = f"No checkpoint has a '{monitor}', so that none is the best of this training. The newest takes its place: "
    assert f"{said}{saver.last_model_path}" in caplog.text
    assert ("No validation runs in this training" in caplog.text) == bool(before)
    assert before in caplog.text
    assert saver.best_model_path == saver.last_model_path == str(tmp_path / "checkpoints" / saved(tmp_path)[0].name)


def test_a_misspelt_monitor_stops_the_training_behind_the_checkpoint_of_its_first_validation(tmp_path: Path) -> None:
    said = r"monitor='val/los'\), but nobody has logged that\. Logged are: val/loss\..* up to here is in .*step=8"
    with pytest.raises(MisconfigurationException, match=said):
        train(tmp_path, checkpoint={"monitor": "val/los"})
    assert [each.step for each in saved(tmp_path)] == [8]
    train(tmp_path, checkpoint={"monitor": "val/loss", "resume": "auto"})
    assert saved(tmp_path)[0].step == 30


class _LogsAtTheEnd(Noisy):
    """Logs one metric of the epoch from its steps, and one from its end; both after the first validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("of_epoch", 1.0, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class _LogsInAHook(Noisy):
    def on_train_epoch_end(self) -> None:
        self.log("at_end", 1.0)


class _LogsTwice(Noisy):
    """Lightning calls the value of the epoch `twice_epoch`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("twice", 1.0, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


class _LoggingCallback(Callback):
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("by_callback", 1.0)


def test_a_metric_that_a_callback_logs_at_the_end_of_the_epoch_is_waited_for(tmp_path: Path) -> None:
    saver = train(tmp_path, _LoggingCallback(), checkpoint={"monitor": "by_callback"}, max_epochs=2)
    assert saver.best_model_score == 1.0


@pytest.mark.parametrize(
    ("module", "monitor"), [(_LogsAtTheEnd, "of_epoch"), (_LogsInAHook, "at_end"), (_LogsTwice, "twice_epoch")]
)
def test_a_metric_that_comes_at_the_end_of_the_epoch_is_waited_for(
    tmp_path: Path, module: type[Noisy], monitor: str
) -> None:
    saver = train(tmp_path, module=module(), checkpoint={"monitor": monitor}, max_epochs=2)
    assert saver.best_model_score == 1.0


@pytest.mark.parametrize(("logged", "best"), [("val/loss", "val/loss"), ("other", None)])
def test_a_recipes_own_monitor_gives_way_to_the_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, logged: str, best: str | None
) -> None:
    class Other(Noisy):
        def log(self, name: str, *arguments: Any, **named: Any) -> None:
            super().log(logged if name == "val/loss" else name, *arguments, **named)

    saver = JobCheckpoint(tmp_path / "checkpoints", monitor="val/top1", mode="max", save_top_k=1)
    saver.monitor_is_default = True
    settings = {**QUIET, "accelerator": "cpu", "logger": False, "max_epochs": 1, "val_check_interval": 8}
    Trainer(callbacks=[saver], **settings).fit(Other(), datamodule=Numbers())
    said = next(each for each in caplog.messages if "val/top1" in each)
    assert ("lowest val/loss" if best else "newest checkpoints stay") in said
    scores = {each.score for each in saved(tmp_path)} - {None}
    assert saver.monitor == (best or "val/top1")
    assert saver.best_model_score == (min(scores) if best else None)
    assert saver.best_model_path


def test_a_metric_of_the_training_ranks_where_there_is_no_validation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = train(tmp_path, module=_LogsInTraining(), checkpoint={"monitor": "own"}, limit_val_batches=0, max_epochs=2)
    assert [each for each in caplog.messages if "'own'" in each] == [say_unranked("own", "limit_val_batches=0")]
    assert [each.score for each in saved(tmp_path)] == [29.0, 29.0]
    assert saver.best_model_path


class _Asked(Callback):
    """What is said before the first step; nothing is trained."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.said = never_validates(trainer)
        trainer.should_stop = True


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_steps": 8},
        {"max_steps": 4, "accumulate_grad_batches": 2},
        {"max_epochs": 2, "check_val_every_n_epoch": 2},
        {"max_epochs": -1},
        {"max_epochs": 1, "val_check_interval": 1.0},
        {"max_steps": 2, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 8})]},
        {"max_steps": 5, "val_check_interval": "00:00:00:01"},
    ],
)
def test_where_a_validation_may_run_nothing_is_said(arguments: dict[str, Any]) -> None:
    asked = _Asked()
    callbacks = [asked, *arguments.pop("callbacks", [])] if "callbacks" in arguments else [asked]
    settings = {"max_epochs": 1, "val_check_interval": 8, **QUIET, **arguments, "callbacks": callbacks}
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **settings)
    trainer.fit(Noisy(), datamodule=Numbers())
    assert asked.said == ""
