"""What the variable adds to each fit of a job does no harm to a script that never heard of it."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from mlflow import MlflowClient
from tests.emulator.conftest import _empty_store, store
from tests.multiprocess.scripts.noisy import FEATURES, Killed, Noisy, Numbers, StopAt
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from azureml_strategy.checkpoint import JobCheckpoint, ResumeError, automatic
from azureml_strategy.checkpoint.automatic import AutomaticCheckpoint, ForgivingCheckpoint
from azureml_strategy.checkpoint.fit_resume import OUTPUT_VARIABLE, this_process
from azureml_strategy.checkpoint.folder import CheckpointFolder
from azureml_strategy.cluster.environ import CHECKPOINT_SWITCH
from azureml_strategy.preemption.termination import TerminateTogether
from azureml_strategy.strategies.compilation.cache import CompileCache
from azureml_strategy.tracking import JobMLFlowLogger

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

__all__ = ["_empty_store", "store"]  # fixtures
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "max_epochs": 2,
}


@pytest.fixture(autouse=True)
def _job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A job of one process, with an output, in which checkpoints are asked for."""
    monkeypatch.setenv("AZUREML_RUN_ID", "job-1")
    monkeypatch.setenv("AZUREML_NODE_COUNT", "1")
    monkeypatch.setenv(OUTPUT_VARIABLE, str(tmp_path / "run"))
    monkeypatch.setenv(CHECKPOINT_SWITCH, "auto")
    monkeypatch.setenv("AZUREML_STRATEGY_SCHEDULED_EVENTS", "off")


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Act as the next attempt: another process."""
    count = iter(range(1000))
    return lambda: monkeypatch.setattr("azureml_strategy.checkpoint.fit_resume._process", f"process {next(count)}")


def checkpoints(tmp_path: Path, name: str = "checkpoints") -> list[int]:
    return [each.step for each in CheckpointFolder(tmp_path / "run" / name).complete()]


def rows() -> DataLoader[Any]:
    return DataLoader(Numbers().rows, batch_size=10)


def fit(module: LightningModule | None = None, data: Any = None, **arguments: Any) -> Trainer:
    trainer = Trainer(**{**QUIET, **arguments})
    trainer.fit(module or Noisy(), rows() if data is None else data)
    return trainer


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name.startswith("azureml_strategy.checkpoint.auto")]


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch, store: MlflowClient) -> MlflowClient:
    """The second attempt of a job that asks for no checkpoints; its first has been stopped after step 12."""
    run_id = store.create_run("0", run_name="job").info.run_id
    store.set_tag(run_id, "stopped.attempt_0", "preempted, after step 12")
    for name in ("AZUREML_RUN_ID", "MLFLOW_RUN_ID"):
        monkeypatch.setenv(name, run_id)
    monkeypatch.setenv("AZUREML_CR_COMPUTE_CONTEXT", '{"run_attempt_count": 1}')
    monkeypatch.delenv(CHECKPOINT_SWITCH)
    monkeypatch.setattr("azureml_strategy.checkpoint.automatic._noticed", [])
    return store


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in warnings_of(caplog) if "started again" in each]


def test_a_restarted_script_that_begins_anew_is_told_what_is_lost(
    restarted: MlflowClient, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        fit(max_epochs=1, logger=JobMLFlowLogger(tracking_uri=restarted.tracking_uri))
    (told,) = notices(caplog)
    assert "begins at step 0" in told
    assert "(attempt 0 stopped: preempted, after step 12)" in told
    assert "AZUREML_STRATEGY_CHECKPOINT=auto" in told
    caplog.clear()
    automatic._noticed.clear()
    fit(max_epochs=1, callbacks=[JobCheckpoint()])
    assert "give the script JobCheckpoint(resume='auto')" in notices(caplog)[0]
    assert "=auto among" not in notices(caplog)[0]


@pytest.mark.usefixtures("restarted")
def test_who_goes_on_or_has_said_so_is_told_nothing(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = fit(max_epochs=1, callbacks=[JobCheckpoint(resume="never")])
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    Trainer(**QUIET).fit(Noisy(), rows(), ckpt_path=str(tmp_path / "own.ckpt"))
    fit(fast_dev_run=True)
    for word in ("auto", "off"):
        monkeypatch.setenv(CHECKPOINT_SWITCH, word)
        fit(max_epochs=1)
    monkeypatch.delenv(CHECKPOINT_SWITCH)
    monkeypatch.setenv("AZUREML_CR_COMPUTE_CONTEXT", '{"run_attempt_count": 0}')
    fit(max_epochs=1)
    assert notices(caplog) == []


class Lambda(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"function": lambda: None}


class Failing(Callback):
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("nobody asked for this before")


class SaveAt(Callback):
    """Asks for a checkpoint, as a preemption does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_boundary(self, trainer: Trainer) -> None:
        if trainer.global_step == self.step:
            for each in trainer.checkpoint_callbacks:
                if isinstance(each, JobCheckpoint):
                    each.save_now(trainer, "test")


@pytest.mark.parametrize("callback", [Lambda, Failing])
def test_what_cannot_be_saved_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, callback: type[Callback]
) -> None:
    saver = ModelCheckpoint(tmp_path / "theirs", save_top_k=0)
    trainer = fit(callbacks=[callback(), saver, SaveAt(2), SaveAt(4)])
    assert trainer.global_step == 12
    (said,) = warnings_of(caplog)
    assert "This training cannot be kept in checkpoints. " in said
    assert "Training goes on" in said
    assert f"{CHECKPOINT_SWITCH}=off" in said
    assert checkpoints(tmp_path) == []


def test_a_lambda_among_the_hyperparameters_is_left_out(tmp_path: Path) -> None:
    class Module(Noisy):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

    assert fit(Module(len)).global_step == 12
    assert checkpoints(tmp_path) == [12]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.zeros(2, FEATURES), torch.zeros(2, 1))] * 5)


class Manual(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.network(batch[0]), batch[1]))
        optimizer.step()


@pytest.mark.parametrize(
    ("module", "data", "arguments"),
    [
        pytest.param(Noisy, lambda: DataLoader(Stream(), batch_size=None), {}, id="iterable"),
        pytest.param(Manual, rows, {}, id="manual optimization"),
        pytest.param(Noisy, rows, {"callbacks": [StochasticWeightAveraging(1e-2, 1)]}, id="SWA"),
        pytest.param(Noisy, rows, {"callbacks": [EMAWeightAveraging()]}, id="EMA"),
        pytest.param(Noisy, rows, {"max_epochs": -1, "max_steps": 9}, id="max_steps"),
        pytest.param(Noisy, rows, {"accumulate_grad_batches": 4}, id="accumulation"),
    ],
)
def test_it_trains_as_without(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    restart: Any,
    module: type[LightningModule],
    data: Any,
    arguments: dict[str, Any],
) -> None:
    """And goes on in the middle."""
    callbacks = arguments.get("callbacks", [])
    monkeypatch.setenv(CHECKPOINT_SWITCH, "off")
    weights = trained(module, data, arguments)
    monkeypatch.setenv(CHECKPOINT_SWITCH, "auto")
    assert equal(trained(module, data, arguments), weights)
    restart()
    for path in (tmp_path / "run").rglob("*.ckpt*"):
        path.unlink()
    with pytest.raises(Killed):
        trained(module, data, {**arguments, "callbacks": [*_fresh(callbacks), SaveAt(2), StopAt(8)]})
    assert checkpoints(tmp_path) == [2]
    restart()
    arguments = {**arguments, "callbacks": [*_fresh(callbacks), SaveAt(-1), StopAt(10**6)]}
    assert equal(trained(module, data, arguments), weights)
    assert warnings_of(caplog) == []


def _fresh(callbacks: list[Callback]) -> list[Callback]:
    averaging = {StochasticWeightAveraging: (1e-2, 1), EMAWeightAveraging: ()}
    return [type(each)(*averaging[type(each)]) for each in callbacks]


def trained(module: type[LightningModule], data: Any, arguments: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    made = module()
    given = {**arguments, "callbacks": arguments.get("callbacks") or []}
    if not any(isinstance(each, StopAt) for each in given["callbacks"]):
        given["callbacks"] = _fresh(given["callbacks"])
    fit(made, data(), **given)
    return [each.detach().clone() for each in made.parameters()]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("arguments", [{"enable_checkpointing": False}, {"fast_dev_run": True}, {"barebones": True}])
def test_trainers_that_want_none_get_none(tmp_path: Path, arguments: dict[str, Any]) -> None:
    quiet = {name: QUIET[name] for name in ("accelerator", "max_epochs")} if "barebones" in arguments else QUIET
    trainer = Trainer(**{**quiet, **arguments})
    trainer.fit(Noisy(), rows())
    assert checkpoints(tmp_path) == []
    assert not (tmp_path / "run").exists()


def test_a_job_checkpoint_of_the_script_is_enough(tmp_path: Path) -> None:
    fit(callbacks=[JobCheckpoint(tmp_path / "theirs", every_n_train_steps=6)])
    assert not (tmp_path / "run").exists()


def test_evaluation_alone_writes_nothing_and_finds_the_best(tmp_path: Path) -> None:
    trainer = fit(limit_val_batches=1, max_epochs=1)
    assert isinstance(trainer.checkpoint_callback, ModelCheckpoint)
    assert not isinstance(trainer.checkpoint_callback, JobCheckpoint), "the script's own"
    assert not any(isinstance(each, ForgivingCheckpoint) for each in trainer.callbacks)
    before = sorted((tmp_path / "run").rglob("*"))
    trainer.validate(dataloaders=rows(), ckpt_path="best", verbose=False)
    other = Trainer(**QUIET)
    other.predict(_Predicts(), rows())
    assert sorted((tmp_path / "run").rglob("*")) == before


class _Predicts(Noisy):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.network(batch[0])


def test_a_checkpoint_of_the_script_is_lightnings_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its module keeps in it, and without an entry of ours."""

    class Keeps(Noisy):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["path"] = Path("/data")

    trainer = fit(Keeps(), callbacks=[ModelCheckpoint(tmp_path / "theirs")])
    theirs = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
    assert theirs["path"] == Path("/data")
    assert not [name for name in theirs if name.startswith("azureml")]
    assert checkpoints(tmp_path) == [12]


class Wider(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(FEATURES, 9), nn.Linear(9, 1))


def test_several_fits_go_on_from_their_own(tmp_path: Path, restart: Any) -> None:
    restart()
    for module in (Noisy(), Wider()):
        fit(module)
    for fold in range(3):
        fit(Noisy(), max_epochs=fold + 1)
    assert [checkpoints(tmp_path, f"checkpoints{n}") for n in ("", "_2", "_3", "_4", "_5")] == [
        *([12], [12], [6], [12], [18]),
    ]


def test_a_restart_that_skips_a_fit_goes_on_with_the_other(tmp_path: Path, restart: Any) -> None:
    restart()
    fit(Noisy())
    with pytest.raises(Killed):
        _second(StopAt(8), SaveAt(5))
    assert checkpoints(tmp_path, "checkpoints_2") == [5]
    restart()  # which knows that the first is done
    assert _second(SaveAt(0), StopAt(7)).global_step == 12, "7 steps were left"
    assert checkpoints(tmp_path) == [12], "of the first"


def _second(*callbacks: Callback) -> Trainer:
    return fit(Wider(), callbacks=list(callbacks))


def test_a_model_that_has_changed_is_another_fit(tmp_path: Path, restart: Any) -> None:
    for module in (Noisy, Wider):
        restart()
        fit(module())
    assert checkpoints(tmp_path) == checkpoints(tmp_path, "checkpoints_2") == [12]


def test_another_jobs_checkpoints_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: Any
) -> None:
    for job in ("job-1", "job-2"):
        restart()
        monkeypatch.setenv("AZUREML_RUN_ID", job)
        assert one_fit().global_step == 12
    assert checkpoints(tmp_path) == checkpoints(tmp_path, "checkpoints_2") == [12]
    restart()
    monkeypatch.setenv("AZUREML_RUN_ID", "job-3")
    monkeypatch.setenv(CHECKPOINT_SWITCH, "any")
    one_fit(StopAt(0))
    assert checkpoints(tmp_path, "checkpoints_3") == []


def one_fit(*callbacks: Callback) -> Trainer:
    return fit(callbacks=list(callbacks))


def test_a_damaged_one_is_left_out(tmp_path: Path, restart: Any) -> None:
    with pytest.raises(Killed):
        one_fit(SaveAt(3), SaveAt(5), StopAt(8))
    assert checkpoints(tmp_path) == [5, 3]
    newest = next((tmp_path / "run/checkpoints").glob("*step=5.ckpt"))
    newest.write_bytes(newest.read_bytes()[:-1])
    restart()
    assert one_fit(SaveAt(-1), SaveAt(-1), StopAt(9)).global_step == 12, "9 steps were left"


def test_a_fit_that_was_given_a_checkpoint_goes_on_from_that(
    tmp_path: Path, restart: Any, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = fit(callbacks=[ModelCheckpoint(tmp_path / "theirs", save_top_k=-1)])
    first = next((tmp_path / "theirs").glob("epoch=0*"))
    restart()
    trainer = Trainer(**QUIET, callbacks=[StopAt(6)])
    trainer.fit(Noisy(), rows(), ckpt_path=first)
    assert trainer.global_step == theirs.global_step
    assert f"fit goes on from {first}, as it was told; resume=auto is not asked." in caplog.text


def test_a_resume_that_fails_ends_the_training(tmp_path: Path, restart: Any) -> None:
    """The checkpoint is this job's and of this model: to begin anew would lose what it has learned."""

    class Stateful(Callback):
        def __init__(self, fails: bool) -> None:
            self.fails = fails

        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if self.fails:
                raise KeyError("b")

    for fails in (False, True):
        restart()
        if not fails:
            one_fit(Stateful(False))
    with pytest.raises(KeyError, match="b"):
        one_fit(Stateful(True))
    assert checkpoints(tmp_path) == [12]


def test_a_method_after_a_fit_that_failed_early_loads_nothing_of_ours(tmp_path: Path, restart: Any) -> None:
    class FailsInSetup(Noisy):
        fails = False

        def setup(self, stage: str) -> None:
            if self.fails and stage == "fit":
                raise RuntimeError("here")

    one = [FailsInSetup(), FailsInSetup()]
    one[1].fails = True
    trainer = None
    for module in one:
        restart()
        trainer = Trainer(**{**QUIET, "limit_val_batches": 1})
        if module.fails:
            with pytest.raises(RuntimeError, match="here"):
                trainer.fit(module, rows())
        else:
            trainer.fit(module, rows())
    assert trainer is not None
    weights = [each.detach().clone() for each in one[1].parameters()]
    trainer.validate(one[1], rows(), verbose=False)
    assert equal(list(one[1].parameters()), weights)


@pytest.mark.parametrize("as_callback", [False, True])
def test_searches(tmp_path: Path, caplog: pytest.LogCaptureFixture, as_callback: bool) -> None:
    finder = LearningRateFinder(num_training_steps=4)

    class Module(Noisy):
        lr = 1e-3

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    trainer = Trainer(**QUIET, callbacks=[finder] if as_callback else [])
    module = Module()
    if not as_callback:
        Tuner(trainer).lr_find(module, rows(), num_training=4)
    trainer.fit(module, rows())
    assert trainer.global_step == 12
    assert checkpoints(tmp_path) == ([] if as_callback else [12])
    assert ["A fit with a LearningRateFinder cannot be resumed" in each for each in warnings_of(caplog)] == (
        [True] if as_callback else []
    )


@pytest.mark.parametrize(("word", "count"), [("auto", 1), ("ANY ", 1), ("never", 1), ("off", 0), ("", 0), ("yes", 0)])
def test_words(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, word: str, count: int) -> None:
    monkeypatch.setenv(CHECKPOINT_SWITCH, word)
    monkeypatch.delitem(sys.modules, "lightning.pytorch.cli", raising=False)  # another test's, which adds a callback
    trainer = Trainer(**QUIET)
    ours = [type(each) for each in trainer.callbacks if type(each).__module__.startswith("azureml_strategy")]
    ours.remove(CompileCache)
    assert ours == [TerminateTogether, AutomaticCheckpoint] * count
    assert ("AZUREML_STRATEGY_CHECKPOINT=yes is no word for it" in caplog.text) == (word == "yes")


def test_never_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: Any) -> None:
    for word in ("auto", "never"):
        restart()
        monkeypatch.setenv(CHECKPOINT_SWITCH, word)
        with pytest.raises(Killed):
            one_fit(SaveAt(3), StopAt(5))
    assert checkpoints(tmp_path) == [3, 3]


def test_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(OUTPUT_VARIABLE, str(tmp_path / "file"))
    assert one_fit().global_step == 12
    assert len(warnings_of(caplog)) == 1


def test_the_strict_error_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of the script's own is as strict as a recipe."""
    one_fit(JobCheckpoint(resume="auto", every_n_train_steps=6))
    monkeypatch.setenv("AZUREML_RUN_ID", "job-2")
    monkeypatch.setattr("azureml_strategy.checkpoint.fit_resume._process", "another")
    with pytest.raises(ResumeError, match="of run job-1, and this is run job-2"):
        one_fit(JobCheckpoint(resume="auto"))


def test_what_is_forked_for_each_fit_is_one_script(tmp_path: Path) -> None:
    """Fits of a notebook are forked. As scripts of their own, the second would go on from the first."""
    trainer, adds = Trainer(**QUIET, default_root_dir=tmp_path), AutomaticCheckpoint("auto")
    reader, writer = multiprocessing.Pipe()

    def fit() -> None:
        adds.setup(trainer, Noisy(), "fit")
        (saver,) = [each for each in trainer.checkpoint_callbacks if isinstance(each, ForgivingCheckpoint)]
        assert saver._fit_resume is not None
        writer.send(saver._fit_resume._process)

    for _ in range(2):
        child = multiprocessing.get_context("fork").Process(target=fit)
        child.start()
        child.join()
        assert child.exitcode == 0
        assert reader.recv() == this_process()
