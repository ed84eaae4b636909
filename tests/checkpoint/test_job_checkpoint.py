"""One process that ends at any batch, and goes on: the same weights and the same curve to the last bit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.checkpoint.saving import QUIET, SaveNow, copied
from tests.multiprocess.scripts.noisy import Killed, Noisy, Numbers, StopAt, curve, fit
from torch.utils.data import DataLoader

from azureml_strategy.checkpoint import JobCheckpoint, ResumeError
from azureml_strategy.checkpoint.folder import CheckpointFolder
from azureml_strategy.checkpoint.resume import newest_valid

pytestmark = pytest.mark.usefixtures("seeded")
VARIANTS: dict[str, dict[str, Any]] = {
    "within the epoch": {},
    "workers": {"workers": 2, "accumulate_grad_batches": 1},
    "validated after the epoch": {"val_check_interval": 1.0},
    "not validated": {"limit_val_batches": 0, "checkpoint": {"monitor": None, "every_n_train_steps": None}},
    "only by step": {"limit_val_batches": 0, "checkpoint": {"monitor": None, "every_n_train_steps": 3}},
    "counted in steps": {"max_epochs": -1, "max_steps": 26, "check_val_every_n_epoch": None, "val_check_interval": 9},
}


class _Asks(Noisy):
    """Has Lightning make the loaders before it restores the checkpoint's loops."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 30
        return super().configure_optimizers()


@pytest.mark.filterwarnings("ignore:After a restart")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_module_that_asks_for_the_number_of_steps(tmp_path: Path, workers: int) -> None:
    whole = fit(tmp_path / "whole", module=_seeded_module(), workers=workers)
    with pytest.raises(Killed):
        fit(tmp_path / "killed", StopAt(11), module=_seeded_module(), workers=workers)
    again = fit(tmp_path / "killed", module=_seeded_module(), workers=workers)
    assert again["weights"] == whole["weights"]
    assert curve(tmp_path / "killed" / "curve.jsonl") == curve(tmp_path / "whole" / "curve.jsonl")


def _seeded_module() -> Noisy:
    torch.manual_seed(0)
    return _Asks()


@pytest.mark.filterwarnings("ignore:After a restart")
@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_again_and_again(tmp_path: Path, variant: str) -> None:
    arguments = VARIANTS[variant]
    whole = fit(tmp_path / "whole", **copied(arguments))
    for _ in range(8):
        with pytest.raises(Killed):
            fit(tmp_path / "killed", StopAt(9), **copied(arguments))
        if len(list((tmp_path / "killed" / "checkpoints").glob("*.manifest.json"))) and _step(tmp_path) > 20:
            break
    again = fit(tmp_path / "killed", **copied(arguments))
    assert again["weights"] == whole["weights"]
    assert again["step"] == whole["step"]
    assert Path(again["best"]).name == Path(whole["best"]).name
    assert curve(tmp_path / "killed" / "curve.jsonl") == curve(tmp_path / "whole" / "curve.jsonl")


def test_the_last_two_and_the_best_stay(tmp_path: Path) -> None:
    done = fit(tmp_path / "run")
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    complete = folder.complete()
    assert [each.step for each in complete[:2]] == [30, 28]
    assert len(complete) == 3
    best = complete[2]
    assert best.reason == "epoch"
    assert Path(done["best"]).name == best.name
    values = curve(tmp_path / "run" / "curve.jsonl")
    assert best.score == min(value for (name, _), at in values.items() if name == "val/loss" for value in at)
    assert len(list(folder.path.iterdir())) == 6, "three checkpoints and their manifests, nothing else"


def test_a_damaged_one_takes_no_sound_ones_place(tmp_path: Path) -> None:
    only_by_step: dict[str, Any] = {"limit_val_batches": 0, "checkpoint": {"monitor": None, "every_n_train_steps": 3}}
    with pytest.raises(Killed):
        fit(tmp_path, StopAt(13), **copied(only_by_step))
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert [each.step for each in folder.complete()] == [6, 3]
    damaged = folder.path / folder.complete()[0].name
    damaged.write_bytes(b"torn")
    with pytest.raises(Killed):
        fit(tmp_path, StopAt(7), **copied(only_by_step))
    assert sorted(each.step for each in folder.complete()) == [3, 6, 6], "the sound one is not pushed out"
    fit(tmp_path, StopAt(1000), **copied(only_by_step))
    assert not damaged.exists(), "it is older than what was gone on from then"


def test_a_clock_that_is_a_day_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job comes back on another node."""
    only_by_step: dict[str, Any] = {"limit_val_batches": 0, "checkpoint": {"monitor": None, "every_n_train_steps": 3}}
    folder, now = CheckpointFolder(tmp_path / "checkpoints"), time.time
    with pytest.raises(Killed):
        fit(tmp_path, StopAt(13), **copied(only_by_step))
    assert [each.step for each in folder.complete()] == [6, 3]
    monkeypatch.setattr(time, "time", lambda: now() - 86400)
    with pytest.raises(Killed):
        fit(tmp_path, StopAt(13), **copied(only_by_step))
    assert [each.step for each in folder.complete()] == [12, 9]
    assert newest_valid(tmp_path) == folder.path / "epoch=0-step=12.ckpt"
    assert [each.attempt for each in folder.complete()] == [2, 2]


def test_a_run_that_begins_anew_is_newer_than_what_it_found(tmp_path: Path) -> None:
    by_step: dict[str, Any] = {"monitor": None, "every_n_train_steps": 3, "every_n_epochs": 0}
    for attempt in (1, 2):
        saver = JobCheckpoint(tmp_path, **by_step)
        steps = 9 if attempt == 1 else 3
        trainer = Trainer(accelerator="cpu", devices=1, max_steps=steps, logger=False, callbacks=[saver], **QUIET)
        trainer.fit(Noisy(), datamodule=Numbers())
    assert [(each.attempt, each.step) for each in CheckpointFolder(tmp_path).complete()] == [(2, 3), (1, 9)]


def test_save_now_saves_once(tmp_path: Path) -> None:
    asked = SaveNow()
    with pytest.raises(Killed):
        fit(tmp_path / "run", asked, StopAt(15), logger=False)
    first, second = asked.paths[:2]
    assert first == second == str(tmp_path / "run" / "checkpoints" / "epoch=0-step=7.ckpt")
    newest = CheckpointFolder(tmp_path / "run" / "checkpoints").complete()[0]
    assert (newest.step, newest.reason, newest.score) == (7, "preempted", None)


def test_by_time(tmp_path: Path) -> None:
    arguments = {"monitor": None, "every_n_train_steps": None, "every_minutes": 1e-6}
    with pytest.raises(Killed):
        fit(tmp_path / "run", StopAt(9), logger=False, checkpoint=arguments)
    assert [each.step for each in CheckpointFolder(tmp_path / "run" / "checkpoints").complete()] == [4, 3]


@pytest.mark.parametrize(
    "arguments", [{"keep_last": 0}, {"every_n_train_steps": 0}, {"every_n_train_steps": -2}, {"every_minutes": 0}]
)
def test_arguments_are_checked_at_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is out of range"):
        JobCheckpoint(**arguments)


def _step(tmp_path: Path) -> int:
    return CheckpointFolder(tmp_path / "killed" / "checkpoints").complete()[0].step


class _Plain(Numbers):
    """A loader that does not know its place."""

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=2, shuffle=True)


def test_a_loader_that_does_not_know_its_place_is_read_again_or_refused(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", data=_Plain())
    with pytest.raises(Killed):
        fit(tmp_path / "killed", StopAt(9), data=_Plain())
    with pytest.raises(ResumeError, match=r"after 8 batches of an epoch, and the data loader does not know its place"):
        fit(tmp_path / "killed", data=_Plain(), checkpoint={"read_again": False})
    assert fit(tmp_path / "killed", data=_Plain())["weights"] == whole["weights"]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_one_of_lightnings_own_callback_is_resumed_as_lightning_does_it(tmp_path: Path) -> None:
    """With a warning: it was taken in the middle of a step."""
    with pytest.raises(Killed):
        fit(tmp_path, ModelCheckpoint(tmp_path / "stock", every_n_train_steps=3), StopAt(13), logger=False)
    (stock,) = (tmp_path / "stock").glob("*.ckpt")
    trainer = Trainer(accelerator="cpu", max_epochs=1, logger=False, callbacks=[JobCheckpoint(tmp_path / "b")], **QUIET)
    with pytest.warns(UserWarning, match="was not written by JobCheckpoint, between two steps"):
        trainer.fit(Noisy(), datamodule=Numbers(), ckpt_path=stock)


class _Tested(Noisy):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/rows", float(len(batch[0])))


def test_what_is_loaded_to_be_tested_resumes_no_later_training(tmp_path: Path) -> None:
    fit(tmp_path / "run", max_epochs=1, logger=False)
    newest = CheckpointFolder(tmp_path / "run" / "checkpoints").complete()[0]
    saver = JobCheckpoint(tmp_path / "other")
    trainer = Trainer(accelerator="cpu", max_epochs=1, logger=False, callbacks=[saver], **QUIET)
    data = Numbers()
    trainer.test(_Tested(), data.val_dataloader(), ckpt_path=tmp_path / "run" / "checkpoints" / newest.name)
    trainer.fit(_Tested(), datamodule=data)
    assert trainer.global_step == 30
    assert [each.step for each in CheckpointFolder(tmp_path / "other").complete()] == [30]
