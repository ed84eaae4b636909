"""Checkpoints of values of all kinds, which a restart must be able to load."""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from tests.multiprocess.scripts.keeps import VALUES, Network, Rows, Settings, fit, same, stop_and_go_on

from azureml_strategy.checkpoint import JobCheckpoint, saved_hyperparameters
from azureml_strategy.checkpoint.plain_data import MOVED, UnsavableStateError, from_plain, to_plain
from azureml_strategy.checkpoint.resume import newest_valid
from azureml_strategy.checkpoint.storage_io import AtomicCheckpointIO


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # what seed_everything writes goes away again
        monkeypatch.setenv(name, "0")


@pytest.mark.parametrize("kind", VALUES)
def test_a_restart_gives_back_what_was_kept(kind: str, tmp_path: Path) -> None:
    assert stop_and_go_on(tmp_path, VALUES[kind], lambda: "auto")["wrong"] == []


def test_learning_rates_that_numpy_computed(tmp_path: Path) -> None:
    values = VALUES["numpy scalar"]
    whole, again = fit(tmp_path / "whole", values, "auto"), stop_and_go_on(tmp_path, values, lambda: "auto")
    assert (again["weights"], again["rates"]) == (whole["weights"], whole["rates"])


class Holds(Callback):
    """A callback with a state of one's own."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}


def train(folder: Path, callback: Callback, values: Any = None, saver: Callback | None = None, **arguments: Any) -> Any:
    """Train three steps, with a checkpoint after the second."""
    saver = saver or JobCheckpoint(folder, every_n_train_steps=2, asynchronous=False)
    module = Network(values)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=3,
        callbacks=[callback, saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **arguments,
    )
    trainer.fit(module, datamodule=Rows(values))
    return trainer


@pytest.mark.parametrize("asynchronous", [True, False])
def test_state_without_a_plain_form_ends_the_training_at_the_first_checkpoint(
    tmp_path: Path, asynchronous: bool
) -> None:
    callback = Holds({"path": Path("/data"), "lock": threading.Lock()})
    saver = JobCheckpoint(tmp_path, every_n_train_steps=2, asynchronous=asynchronous)
    message = r"callbacks → Holds → state → lock is a _thread.lock.*In the state_dict\(\).*return numbers, strings"
    with pytest.raises(UnsavableStateError, match=message):
        train(tmp_path, callback, saver=saver)
    assert list(tmp_path.glob("*")) == []


def test_hyperparameters_without_one_cost_a_warning(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"hyperparameter values is not in the checkpoints: it holds a torch.nn.*ReLU"
    ) as all_:
        train(tmp_path, Callback(), values=torch.nn.ReLU())
    ours = [each for each in all_ if "is not in the checkpoints" in str(each.message)]
    assert len(ours) == 1, "module and data module say the same of it, at each checkpoint"
    newest = newest_valid(tmp_path)
    assert newest is not None
    assert saved_hyperparameters(newest) == {"width": 4}


def test_what_others_read_is_whole_or_not_there(tmp_path: Path) -> None:
    train(tmp_path, Holds(VALUES["dataclass"]), values=VALUES["nested"])
    newest = newest_valid(tmp_path)
    assert newest is not None
    saved = torch.load(newest, weights_only=True)
    assert saved["hyper_parameters"] == {"width": 4}
    assert saved["datamodule_hyper_parameters"] == {"batch_size": 2}
    assert "Holds" not in saved["callbacks"]
    assert saved["of_module"] == {"count": 3}
    assert saved_hyperparameters(newest) == {"width": 4, "values": VALUES["nested"]}
    again = Network.load_from_checkpoint(newest, **saved_hyperparameters(newest))
    assert again.values == VALUES["nested"]
    assert Network.load_from_checkpoint(newest, values=3).values == 3, "who reads it gives what is missing"


def test_evaluation_gets_it_back_too(tmp_path: Path) -> None:
    train(tmp_path, Callback(), values=VALUES["nested"])
    newest, module = newest_valid(tmp_path), Network(None)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", devices=1, callbacks=[JobCheckpoint(tmp_path)], **quiet)
    trainer.predict(module, Rows(None).val_dataloader(), ckpt_path=newest)
    assert module.given == VALUES["nested"]


class Marks(Callback):
    """Puts a dictionary with an attribute into a checkpoint: it looks plain, and torch writes the attribute, too."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["marked"] = OrderedDict()
        checkpoint["marked"].mark = Settings(Path("/data"))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_one_that_could_not_be_loaded_does_not_count(
    tmp_path: Path, asynchronous: bool, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    caplog.set_level(logging.WARNING)
    train(tmp_path, Marks(), saver=JobCheckpoint(tmp_path, every_n_train_steps=2, asynchronous=asynchronous))
    said = caplog.text + "".join(str(each.message) for each in recwarn)
    assert re.search("No checkpoint at step 2: .*ValueError: a restart could not load it: it holds .*", said)
    assert "keeps.Settings" in said
    assert list(tmp_path.glob("*")) == []


def test_registered_types_lie_where_they_were(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Settings]):
        train(tmp_path, Holds(Settings("/data")))  # type: ignore[arg-type]
        newest = newest_valid(tmp_path)
        assert newest is not None
        saved = torch.load(newest, weights_only=True)
    assert saved["callbacks"]["Holds"] == {"state": Settings("/data")}  # type: ignore[arg-type]
    assert MOVED not in saved


class Own(TorchCheckpointIO):
    """A user's own."""

    saved: dict[str, Any] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        Own.saved = checkpoint
        super().save_checkpoint(checkpoint, path, storage_options)


def test_checkpoints_that_others_write_stay_as_they_are(tmp_path: Path) -> None:
    train(tmp_path, Holds(VALUES["path"]), plugins=[Own()])
    assert Own.saved is not None
    assert Own.saved["callbacks"]["Holds"] == {"state": VALUES["path"]}
    AtomicCheckpointIO(plain=False).save_checkpoint({"a": Path("/data")}, tmp_path / "plain.ckpt")
    assert torch.load(tmp_path / "plain.ckpt", weights_only=False) == {"a": Path("/data")}


def test_nothing_moves_twice_or_changes() -> None:
    state = torch.nn.Linear(1, 1).state_dict()
    state["extra"] = Path("/data")  # type: ignore[assignment]
    checkpoint = {"state_dict": state, "list": [1, Path("/a"), {Path("/b"): 1}], "whole": {Path("/c"): 1}, "plain": 1}
    plain = to_plain(checkpoint)
    assert to_plain(plain) == plain
    assert list(state) == ["weight", "bias", "extra"]
    assert plain["state_dict"]._metadata == state._metadata  # type: ignore[attr-defined]
    assert plain["list"] == [1, None, None]
    assert "whole" not in plain
    again = from_plain(plain)
    assert again.keys() == checkpoint.keys()
    assert all(same(again[name], checkpoint[name]) for name in ("list", "whole", "plain"))
    assert again["state_dict"]["extra"] == Path("/data")
    assert to_plain({"plain": 1}) == {"plain": 1}
    assert from_plain(to_plain(checkpoint, ["state_dict"]))["state_dict"] is state


def test_what_is_gone_is_named(recwarn: pytest.WarningsRecorder) -> None:
    gone = ["reference", ["no_such_module", "Gone"]]
    at = ["plain", ["callbacks", "Keeper"]]
    with pytest.raises(
        ValueError, match=r"callbacks → Keeper of the checkpoint cannot be restored: no_such_module.Gone"
    ):
        from_plain({"callbacks": {}, MOVED: [{"at": at, "value": gone}]})
    hyper = {"at": ["plain", ["hyper_parameters", "made_by"]], "value": gone}
    assert from_plain({"hyper_parameters": {"width": 4}, MOVED: [hyper]}) == {"hyper_parameters": {"width": 4}}
    assert "hyper_parameters → made_by of the checkpoint is left out" in str(recwarn[0].message)
