"""One process that ends at any batch, and goes on: the same weights and the same curve to the last bit."""

from __future__ import annotations

import os
import re
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from tests.multiprocess.scripts.noisy import Killed, Noisy, Numbers, StopAt, curve, fit
from torch.utils.data import DataLoader

from azureml_strategy.checkpoint import JobCheckpoint, ResumeError, checkpoint_io
from azureml_strategy.checkpoint.checkpoint_io import AtomicCheckpointIO
from azureml_strategy.checkpoint.folder import CheckpointFolder
from azureml_strategy.checkpoint.manifest import stored_file
from azureml_strategy.checkpoint.plain_data import UnsavableStateError
from azureml_strategy.checkpoint.resume import newest_valid
from azureml_strategy.checkpoint.writer import Saving

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    "within the epoch": {},
    "workers": {"workers": 2, "accumulate_grad_batches": 1},
    "validated after the epoch": {"val_check_interval": 1.0},
    "not validated": {"limit_val_batches": 0, "checkpoint": {"monitor": None, "every_n_train_steps": None}},
    "only by step": {"limit_val_batches": 0, "checkpoint": {"monitor": None, "every_n_train_steps": 3}},
    "counted in steps": {"max_epochs": -1, "max_steps": 26, "check_val_every_n_epoch": None, "val_check_interval": 9},
}


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # what seed_everything writes goes away again
        monkeypatch.setenv(name, "0")


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
    whole = fit(tmp_path / "whole", **_copy(arguments))
    for _ in range(8):
        with pytest.raises(Killed):
            fit(tmp_path / "killed", StopAt(9), **_copy(arguments))
        if len(list((tmp_path / "killed" / "checkpoints").glob("*.manifest.json"))) and _step(tmp_path) > 20:
            break
    again = fit(tmp_path / "killed", **_copy(arguments))
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
        fit(tmp_path, StopAt(13), **_copy(only_by_step))
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert [each.step for each in folder.complete()] == [6, 3]
    damaged = folder.path / folder.complete()[0].name
    damaged.write_bytes(b"torn")
    with pytest.raises(Killed):
        fit(tmp_path, StopAt(7), **_copy(only_by_step))
    assert sorted(each.step for each in folder.complete()) == [3, 6, 6], "the sound one is not pushed out"
    fit(tmp_path, StopAt(1000), **_copy(only_by_step))
    assert not damaged.exists(), "it is older than what was gone on from then"


def test_a_clock_that_is_a_day_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job comes back on another node."""
    only_by_step: dict[str, Any] = {"limit_val_batches": 0, "checkpoint": {"monitor": None, "every_n_train_steps": 3}}
    folder, now = CheckpointFolder(tmp_path / "checkpoints"), time.time
    with pytest.raises(Killed):
        fit(tmp_path, StopAt(13), **_copy(only_by_step))
    assert [each.step for each in folder.complete()] == [6, 3]
    monkeypatch.setattr(time, "time", lambda: now() - 86400)
    with pytest.raises(Killed):
        fit(tmp_path, StopAt(13), **_copy(only_by_step))
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


class _Refuse(Callback):
    """From a batch on, the disk takes only the smallest files, as a full one does; later it takes all again."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        seen = trainer.fit_loop.epoch_loop.total_batch_idx
        if seen in (self.first, self.last):
            size = 3000 if seen == self.first else self.limits[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, self.limits[1]))


@pytest.mark.filterwarnings("ignore:No checkpoint at step")
def test_a_full_disk_costs_a_warning_and_no_older_checkpoint(tmp_path: Path) -> None:
    checkpoint = {"monitor": None, "every_n_train_steps": 4, "asynchronous": False}  # what the disk takes, and when
    quiet = {"logger": False, "limit_val_batches": 0, "checkpoint": checkpoint}
    whole = fit(tmp_path / "whole", **_copy(quiet))
    folder = CheckpointFolder(tmp_path / "full" / "checkpoints")
    seen: list[list[int]] = []
    refuse = _Refuse(20, 50)
    with pytest.warns(UserWarning, match=r"No checkpoint at step 12: .*older checkpoints are as they were"):
        full = fit(tmp_path / "full", refuse, _Look(folder, seen), **_copy(quiet))
    assert full["weights"] == whole["weights"]
    assert seen[24:48] == [[8, 4]] * 24, "the disk is full"
    assert folder.complete()[0].step == 30
    assert all(each.fault(folder.path) is None for each in folder.complete())
    assert len(list(folder.path.iterdir())) == 4


class _Look(Callback):
    """Notes at each batch which checkpoints there are."""

    def __init__(self, folder: CheckpointFolder, seen: list[list[int]]) -> None:
        self.folder, self.seen = folder, seen

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.seen.append([each.step for each in self.folder.complete()])


@pytest.mark.filterwarnings("ignore:No checkpoint at step")
def test_a_disk_too_small_for_another_one_is_seen_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckpointFolder, "free_bytes", lambda folder: 1000)
    with pytest.warns(UserWarning, match=r"No checkpoint at step 4: the disk has 1,000 bytes left, and it takes about"):
        fit(tmp_path / "run", logger=False, max_epochs=1, checkpoint={"asynchronous": False})
    assert [each.step for each in CheckpointFolder(tmp_path / "run" / "checkpoints").complete()] == [2]


@pytest.mark.filterwarnings("ignore:No checkpoint at step")
def test_a_place_that_cannot_be_written_to_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file where the folder should be")
    saver = JobCheckpoint(tmp_path / "run" / "checkpoints", every_n_train_steps=5, asynchronous=False)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, callbacks=[saver], **QUIET)
    with pytest.warns(UserWarning, match="No checkpoint at step 5"):
        trainer.fit(Noisy(), datamodule=Numbers())
    assert trainer.global_step == 30


class _SaveNow(Callback):
    """Asks for a checkpoint between two steps, as the notice of a preemption does."""

    def __init__(self) -> None:
        self.paths: list[str | None] = []

    def on_step_boundary(self, trainer: Trainer) -> None:
        if trainer.global_step == 7:
            saver = trainer.checkpoint_callback
            assert isinstance(saver, JobCheckpoint)
            self.paths += [saver.save_now(trainer, "preempted"), saver.save_now(trainer, "preempted")]


def test_save_now_saves_once(tmp_path: Path) -> None:
    asked = _SaveNow()
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


class _Held(AtomicCheckpointIO):
    """A disk that takes a file only when it is let, and knows on which thread it came."""

    def __init__(self, refused: str = "none") -> None:
        self.came, self.free = threading.Event(), threading.Event()
        self.threads: list[str] = []
        self.refused = refused

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.threads.append(threading.current_thread().name)
        self.came.set()
        assert self.free.wait(60)
        if self.refused in str(path):
            raise OSError("the disk is gone")
        super().save_checkpoint(checkpoint, path, storage_options)


class _At(Callback):
    """Does something at the start of the batch of a number."""

    def __init__(self, batch: int, act: Callable[[], object]) -> None:
        self.batch, self.act = batch, act

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            self.act()


IN_BACKGROUND = {"monitor": None, "every_n_train_steps": 4}
QUICK = {"logger": False, "limit_val_batches": 0, "max_epochs": 1}


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", **QUICK, checkpoint={**IN_BACKGROUND, "asynchronous": False})
    disk, folder = _Held(), CheckpointFolder(tmp_path / "run" / "checkpoints")
    seen: list[Any] = []
    look = _At(14, lambda: seen.append((disk.came.wait(60), folder.complete(), list(disk.threads))))
    behind = fit(
        tmp_path / "run", look, _At(15, disk.free.set), plugins=[disk], **QUICK, checkpoint=dict(IN_BACKGROUND)
    )
    assert seen == [(True, [], ["checkpoint-writer"])], "three steps later the first one was still being written"
    assert [each.step for each in folder.complete()] == [15, 12]
    assert behind["weights"] == whole["weights"]
    assert set(disk.threads) == {"checkpoint-writer"}


class _Sealed(AtomicCheckpointIO):
    """Changes the file after it was written."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        content = bytearray(Path(path).read_bytes())
        content[-1] ^= 1
        Path(path).write_bytes(content)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("disk", [AtomicCheckpointIO, _Sealed])
def test_manifests_say_what_lies_there(tmp_path: Path, disk: type[AtomicCheckpointIO], asynchronous: bool) -> None:
    fit(tmp_path, plugins=[disk()], **QUICK, checkpoint={**IN_BACKGROUND, "asynchronous": asynchronous})
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert [each.step for each in folder.complete()] == [15, 12]
    for manifest in folder.complete():
        assert manifest.files == {manifest.name: stored_file(folder.path / manifest.name)}


def test_a_file_that_lost_its_end_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lose(folder: Path) -> None:
        for file in folder.glob("*step=8*.ckpt"):
            os.truncate(file, 100)

    monkeypatch.setattr(checkpoint_io, "sync_folder", lose)
    fit(tmp_path, **QUICK, checkpoint=dict(IN_BACKGROUND))
    assert re.search(r"No checkpoint at step 8: .* has 100 bytes, and [\d,]+ were written\. Training", caplog.text)
    assert [each.step for each in CheckpointFolder(tmp_path / "checkpoints").complete()] == [15, 12]


def test_training_that_is_to_wait_writes_on_its_own_thread(tmp_path: Path) -> None:
    disk = _Held()
    disk.free.set()
    fit(tmp_path / "run", plugins=[disk], **QUICK, checkpoint={**IN_BACKGROUND, "asynchronous": False})
    assert set(disk.threads) == {"MainThread"}


def test_the_next_one_waits_for_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes nothing before the second one is due: that has to wait, and only then begins."""
    disk = _Held()
    finish = Saving.finish

    def finish_and_let(saving: Saving) -> Any:
        if saving.under_way:
            assert disk.came.wait(60)
            assert len(disk.threads) == 1 or disk.free.is_set()
            disk.free.set()
        return finish(saving)

    monkeypatch.setattr(Saving, "finish", finish_and_let)
    fit(tmp_path / "run", plugins=[disk], **QUICK, checkpoint=dict(IN_BACKGROUND))
    assert [each.step for each in CheckpointFolder(tmp_path / "run" / "checkpoints").complete()] == [15, 12]


def test_one_that_was_being_written_when_training_failed_is_complete(tmp_path: Path) -> None:
    disk = _Held()
    with pytest.raises(Killed):
        fit(
            tmp_path / "run",
            _At(10, disk.free.set),
            StopAt(10),
            plugins=[disk],
            **QUICK,
            checkpoint=dict(IN_BACKGROUND),
        )
    assert [each.step for each in CheckpointFolder(tmp_path / "run" / "checkpoints").complete()] == [4]


def test_a_disk_that_fails_behind_the_training_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk, folder = _Held(refused="step=8"), CheckpointFolder(tmp_path / "run" / "checkpoints")
    disk.free.set()
    fit(tmp_path / "run", plugins=[disk], **QUICK, checkpoint=dict(IN_BACKGROUND))
    assert "No checkpoint at step 8: the disk is gone. Training goes on" in caplog.text
    assert [each.step for each in folder.complete()] == [15, 12]
    assert len(list(folder.path.iterdir())) == 4, "nothing of the one that failed is left"


def test_save_now_is_complete_though_another_was_being_written(tmp_path: Path) -> None:
    disk, asked = _Held(), _SaveNow()
    threading.Timer(0.3, disk.free.set).start()  # the seventh step waits for it
    fit(tmp_path / "run", asked, plugins=[disk], **QUICK, checkpoint={**IN_BACKGROUND, "keep_last": 9})
    assert [Path(path or "").name for path in asked.paths] == ["epoch=0-step=7.ckpt"] * 2
    assert [each.step for each in CheckpointFolder(tmp_path / "run" / "checkpoints").complete()] == [15, 12, 8, 7, 4]


class _Unsharded(SingleDeviceStrategy):
    """A strategy with its own way to save, of which nothing is known."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self.thread = threading.current_thread().name
        super().save_checkpoint(checkpoint, filepath, storage_options)


def test_a_strategy_with_its_own_way_to_save_is_waited_for(tmp_path: Path) -> None:
    strategy = _Unsharded(torch.device("cpu"))
    fit(tmp_path / "run", strategy=strategy, **QUICK, checkpoint=dict(IN_BACKGROUND))
    assert strategy.thread == "MainThread"
    assert [each.step for each in CheckpointFolder(tmp_path / "run" / "checkpoints").complete()] == [15, 12]


class _WritesNothing(AtomicCheckpointIO):
    def save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        return


class _Unpicklable(Callback):
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["lock"] = threading.Lock()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_cannot_be_saved_ends_the_training_at_its_first_checkpoint(tmp_path: Path, asynchronous: bool) -> None:
    with pytest.raises(UnsavableStateError, match="No checkpoint can be written: lock is a "):
        fit(tmp_path, _Unpicklable(), max_epochs=1, checkpoint={"asynchronous": asynchronous})


@pytest.mark.filterwarnings("ignore:No checkpoint at step")
def test_a_checkpoint_without_files_does_not_count(tmp_path: Path) -> None:
    saver = JobCheckpoint(tmp_path, every_n_train_steps=5, every_n_epochs=0, asynchronous=False)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, callbacks=[saver], plugins=[_WritesNothing()], **QUIET
    )
    with pytest.warns(UserWarning, match="No checkpoint at step 5: nothing was written"):
        trainer.fit(Noisy(), datamodule=Numbers())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments", [{"keep_last": 0}, {"every_n_train_steps": 0}, {"every_n_train_steps": -2}, {"every_minutes": 0}]
)
def test_arguments_are_checked_at_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is out of range"):
        JobCheckpoint(**arguments)


def _copy(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in arguments.items()}


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


def test_a_metric_that_nobody_logs_is_an_error_at_once(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, logger=False, callbacks=[JobCheckpoint(tmp_path, monitor="val/los")], **QUIET
    )
    with pytest.raises(MisconfigurationException, match=r"nobody has logged that. Logged are: val/loss"):
        trainer.fit(Noisy(), datamodule=Numbers())
    assert trainer.global_step == 30, "after the first epoch"


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
