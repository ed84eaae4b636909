"""The callback that keeps compiled code: when it looks, where it writes, and what is said if it cannot."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from azureml_strategy.strategies.compilation import cache, cache_file
from azureml_strategy.strategies.compilation.cache import VARIABLE, CompileCache

BATCHES = 9


def compiled(name: str, content: str = "code") -> None:
    """Do as a compiler does."""
    folder = Path(os.environ[VARIABLE])
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content)


class Module(LightningModule):
    """Does something in each batch, as a compiler would, by the number of the batch."""

    def __init__(self, act: Callable[[int], object], validate: bool = False) -> None:
        super().__init__()
        self.layer, self.act, self.validates = nn.Linear(1, 1), act, validate

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.act(batch_idx)
        return self.layer(batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if not self.trainer.sanity_checking and self.validates:
            compiled("ab/of_validation")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


Written = list[set[str]]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    """The names of what each file that was written holds."""
    found: Written = []

    def write(path: Path, folder: Path, names: list[str], here: dict[str, str]) -> int:
        found.append(set(names))
        return cache_file.write_cache(path, folder, names, here)

    monkeypatch.setattr(cache, "write_cache", write)
    return found


@pytest.fixture(autouse=True)
def _a_job_of_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AZUREML_RUN_ID", "quirky_plum")
    monkeypatch.setenv("AZUREML_STRATEGY_CALLBACKS", "off")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))  # so that it is given back
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(cache, "_own_folders", set())
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    monkeypatch.setattr(cache_file, "_compiler", lambda: "12.2")


def fit(root: Path, act: Callable[[int], object], again: bool = False, **options: Any) -> CompileCache:
    """Train for nine batches; `again`: in a process of its own, as far as the callback knows."""
    if again:
        cache._own_folders.clear()
        os.environ.pop(VARIABLE, None)
    callback = CompileCache()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        **{
            **{"accelerator": "cpu", "devices": 1, "enable_model_summary": False, "max_epochs": 1, **quiet},
            **{"callbacks": [Together(), callback], "default_root_dir": root, "limit_val_batches": 0, **options},
        }
    )
    trainer.fit(Module(act, bool(options.get("limit_val_batches"))), torch.ones(BATCHES, 1, 1), torch.ones(2, 1, 1))
    return callback


class Together(cache.IsolatedCallback):
    """Waits for the thread, so that each look sees the end of the one before."""

    switch = ""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        (callback,) = (each for each in trainer.callbacks if isinstance(each, CompileCache))  # type: ignore[attr-defined]
        if callback._thread is not None:
            callback._thread.join()


def at(*batches: int) -> Callable[[int], object]:
    return lambda batch: compiled(f"ab/{batch}") if batch in batches else None


def names(*batches: int) -> set[str]:
    return {f"ab/{batch}" for batch in batches}


def test_where_nothing_is_compiled_nothing_is_written(tmp_path: Path, written: Written) -> None:
    callback = fit(tmp_path / "root", lambda batch: None)
    assert (written, callback._thread, (tmp_path / "root").exists()) == ([], None, False)


def test_new_code_is_kept_after_batches_1_2_4_and_8(tmp_path: Path, written: Written) -> None:
    fit(tmp_path, at(0, 5))
    assert written == [names(0), names(0, 5)]
    written.clear()
    fit(tmp_path, at(*range(BATCHES)), again=True)
    assert written == [names(0, 1, 5), names(*range(4), 5), names(*range(8))], "0 and 5 are those of before"


def test_and_after_a_validation(tmp_path: Path, written: Written) -> None:
    fit(tmp_path, at(0), limit_val_batches=1, max_epochs=1)
    assert written == [names(0), names(0) | {"ab/of_validation"}]


def test_the_next_attempt_has_it_before_its_first_batch(tmp_path: Path, written: Written) -> None:
    fit(tmp_path, lambda batch: compiled("ab/0", "of the first attempt"))
    seen: list[str] = []
    fit(tmp_path, lambda batch: seen.append(Path(os.environ[VARIABLE], "ab/0").read_text()), again=True)
    assert seen == ["of the first attempt"] * BATCHES
    assert written == [names(0)], "it is not written again"


def test_a_second_fit_of_the_process(tmp_path: Path, written: Written) -> None:
    fit(tmp_path / "first", at(0))
    folder = os.environ[VARIABLE]
    fit(tmp_path / "second", at(1))
    assert os.environ[VARIABLE] == folder
    assert written == [names(0), names(0), names(0, 1)], "the second has a file of its own"


@pytest.mark.parametrize("given", ["mine", "disk/torchinductor_mine", f"disk/{Path(default_cache_dir()).name}"])
def test_a_folder_that_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: Written, given: str) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / given))
    fit(tmp_path, at(0))
    kept_there = os.environ[VARIABLE] == str(tmp_path / given)
    assert kept_there is given.endswith("mine"), "torch itself gives the last"
    assert written == [names(0)]


def test_the_last_process_removes_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_end: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", lambda action, *arguments: at_end.append(partial(action, *arguments)))
    fit(tmp_path, at(0))
    folder = os.environ[VARIABLE]
    cache._own_folders.clear()
    cache._use(folder, own=True)  # as another process of the node does
    first, last = at_end
    first()
    assert Path(folder, "ab/0").exists()
    last()
    assert not Path(folder).exists()


def test_what_killed_processes_have_left_is_removed_after_a_day(tmp_path: Path) -> None:
    disk, other = tmp_path / "disk", tmp_path / "mine"
    folders = {name: disk / f"azureml_strategy_compiled_{name}" for name in ("left", "used", "new")}
    for each in (*folders.values(), other):
        each.mkdir()
        (each / "code").touch()
    (disk / "azureml_strategy_compiled_link").symlink_to(other)
    used = os.open(folders["used"], os.O_RDONLY)
    fcntl.flock(used, fcntl.LOCK_SH)
    for each in (folders["left"], folders["used"], other):
        os.utime(each, (0, 0))
    fit(tmp_path, at(0))
    os.close(used)
    assert {name for name, folder in folders.items() if (folder / "code").exists()} == {"used", "new"}
    assert (other / "code").exists()


@pytest.mark.parametrize("root", ["memory://run", "https://account.blob/run"])
def test_what_is_no_folder_is_left_alone(written: Written, root: str) -> None:
    callback = CompileCache()
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, default_root_dir=root, enable_checkpointing=False)
    assert callback._open(trainer) is not None
    assert callback._file is None


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        each.getMessage() for each in caplog.records if each.name.startswith("azureml") and each.levelno > logging.INFO
    ]


def test_a_full_disk_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache_file, "write_atomically", full)
    fit(tmp_path, at(*range(BATCHES)))
    (said,) = warnings_of(caplog)
    assert "node0.bin (No space left on device). Training goes on; the job's next attempt compiles again." in said


def test_a_full_disk_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, written: Written
) -> None:
    fit(tmp_path, at(0))

    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(cache_file, "write_atomically", full)
        fit(tmp_path, lambda batch: None, again=True)
    (said,) = warnings_of(caplog)
    assert "node0.bin cannot be loaded (No space left on device). What is needed is compiled again." in said
    monkeypatch.setattr("tempfile.mkdtemp", full)
    caplog.clear()
    fit(tmp_path, lambda batch: None, again=True)
    (said,) = warnings_of(caplog)
    assert "There is no folder for compiled code" in said


def test_another_version_is_said_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, written: Written
) -> None:
    fit(tmp_path, at(0))
    monkeypatch.setattr(cache_file, "_version", lambda package: "3.6.0")
    fit(tmp_path, at(1), again=True)
    (said,) = warnings_of(caplog)
    assert "node0.bin is not loaded, and will be replaced: it is for azureml-strategy" in said
    assert written == [names(0), names(1)]
    assert [each.name for each in (tmp_path / "compile_cache").iterdir()] == ["node0.bin"]


def test_a_folder_of_everybody_is_neither_read_nor_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, written: Written
) -> None:
    fit(tmp_path, at(0))
    (tmp_path / "compile_cache").chmod(0o777)
    fit(tmp_path, at(1), again=True)
    (said,) = warnings_of(caplog)
    assert "it would run with your rights" in said
    assert "chmod 700; AZUREML_STRATEGY_COMPILE_CACHE=off keeps no compiled code." in said
    assert written == [names(0)]


def test_what_a_killed_writer_has_left_is_removed(tmp_path: Path, written: Written) -> None:
    fit(tmp_path, at(0))
    (tmp_path / "compile_cache" / ".node0.bin.77.part").write_bytes(b"half")
    os.utime(tmp_path / "compile_cache" / ".node0.bin.77.part", (0, 0))
    (tmp_path / "compile_cache" / ".node0.bin.78.part").write_bytes(b"of another training of this node")
    (tmp_path / "compile_cache" / ".node1.bin.77.part").write_bytes(b"of another node, which may be writing")
    fit(tmp_path, at(1), again=True)
    assert sorted(each.name for each in (tmp_path / "compile_cache").iterdir()) == [
        *(".node0.bin.78.part", ".node1.bin.77.part", "node0.bin")
    ]


def test_a_fault_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(folder: Path) -> dict[str, int]:
        raise RuntimeError("torch keeps its code elsewhere")

    monkeypatch.setattr(cache, "compiled_files", broken)
    fit(tmp_path, at(0))
    (said,) = warnings_of(caplog)
    assert "To leave it out from the start, set AZUREML_STRATEGY_COMPILE_CACHE=off." in said


def test_it_can_be_sent_to_a_process_that_is_spawned() -> None:
    assert isinstance(pickle.loads(pickle.dumps(CompileCache())), CompileCache)
