"""One process that comes back with batches of another size, as other ranks would read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy
from tests.checkpoint.conftest import forge
from tests.multiprocess.scripts.noisy import FEATURES, Killed, Noisy, Numbers, StopAt, curve, fit
from torch import Tensor, nn
from torch.utils.data import DataLoader

from azureml_strategy.checkpoint import ElasticRestart, ResumeError, checkpoint_to_resume
from azureml_strategy.checkpoint.elastic import warn_unless_elastic
from azureml_strategy.checkpoint.folder import CheckpointFolder

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

# Other batches add up float32 in another order.
CLOSE = 1e-5


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # what seed_everything writes goes away again
        monkeypatch.setenv(name, "0")


class Steady(Noisy):
    """Draws no random numbers, and asks for the number of steps; notes the samples of each step."""

    def __init__(self, every: int = 1) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.network = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
        self.every = every
        self.read: dict[int, list[float]] = {}
        self.learning_rates: dict[int, float] = {}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        step = self.trainer.global_step
        self.read.setdefault(step, []).extend(batch[1].flatten().tolist())
        self.learning_rates[step] = self.trainer.optimizers[0].param_groups[0]["lr"]
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=int(steps))
        config = {"scheduler": scheduler, "interval": "step", "frequency": self.every}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Rows(Numbers):
    """Validates with the batches that it trains with, as our data modules do."""

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.rows, batch_size=self.batch_size)


def attempt(
    output: Path, batch_size: int, stop_at: int | None = None, kept: Any = "keep", every: int = 1, **arguments: Any
) -> tuple[Steady, dict[str, Any]]:
    module, extra = Steady(every), arguments.pop("callbacks", [])
    output.mkdir(exist_ok=True)
    callbacks = [ElasticRestart(checkpoint_to_resume("auto", output), kept), *extra]
    if stop_at is not None:
        with pytest.raises(Killed):
            fit(output, *callbacks, StopAt(stop_at), module=module, data=Rows(batch_size=batch_size), **arguments)
        return module, {}
    return module, fit(output, *callbacks, module=module, data=Rows(batch_size=batch_size), **arguments)


VARIANTS: dict[str, dict[str, Any]] = {
    "batches between validations": {"val_check_interval": 4},
    "a share of the epoch": {"val_check_interval": 0.4},
    "once an epoch": {"val_check_interval": 1.0},
    "all batches of an epoch": {"val_check_interval": 15},
    "counted over epochs": {
        **{"max_epochs": -1, "max_steps": 20},
        **{"val_check_interval": 6, "check_val_every_n_epoch": None, "limit_val_batches": 4},
    },
    "a schedule of several steps": {"every": 12},
    "part of the data": {"limit_train_batches": 9, "max_epochs": 4},
}


SMALLER = [pytest.param((4, 2), each, id=each) for each in VARIANTS]
# The way back is the same for all of them.
LARGER = [pytest.param((2, 4), each, id=f"larger: {each}", marks=pytest.mark.exhaustive) for each in VARIANTS]
LARGER[0] = pytest.param(*LARGER[0].values, id=LARGER[0].id)


@pytest.mark.parametrize(("sizes", "variant"), [*SMALLER, *LARGER])
def test_the_same_steps(tmp_path: Path, sizes: tuple[int, int], variant: str) -> None:
    arguments = {"accumulate_grad_batches": 8 // sizes[0], "max_epochs": 2, **VARIANTS[variant]}
    if sizes[0] == 2 and "limit_train_batches" in arguments:
        arguments["limit_train_batches"] = 18
    if sizes[0] == 2 and arguments.get("val_check_interval") == 15:
        arguments["val_check_interval"] = 30
    whole, expected = attempt(tmp_path / "whole", sizes[0], **arguments)
    first, _ = attempt(tmp_path / "elastic", sizes[0], stop_at=22, **arguments)
    second, _ = attempt(tmp_path / "elastic", sizes[1], stop_at=8, **arguments)
    third, ended = attempt(tmp_path / "elastic", sizes[0], **arguments)
    assert ended["step"] == expected["step"]
    for step, samples in whole.read.items():
        last = next(each for each in (third, second, first) if step in each.read)
        assert sorted(last.read[step]) == sorted(samples), f"step {step}"
        assert last.learning_rates[step] == pytest.approx(whole.learning_rates[step], rel=1e-12), f"step {step}"
    assert ended["weights"] == pytest.approx(expected["weights"], rel=CLOSE, abs=CLOSE)
    found, wanted = (
        {
            step: min(values)
            for (name, step), values in curve(tmp_path / each / "curve.jsonl").items()
            if name == "val/loss"
        }
        for each in ("elastic", "whole")
    )
    assert found == pytest.approx(wanted, rel=CLOSE)


def test_what_changes_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attempt(tmp_path, 4, stop_at=6, val_check_interval=4, max_epochs=1, limit_val_batches=1)
    assert not _said(caplog)
    attempt(tmp_path, 2, val_check_interval=4, max_epochs=1, limit_val_batches=1)
    assert _said(caplog) == [
        "The global batch stays 8: it was batch size 4 x 1 data-parallel rank(s) x accumulation 2, and is batch size 2 "
        "x 1 data-parallel rank(s) x accumulation 4. Counted in these batches, limit_train_batches=30, "
        "val_check_interval=8, limit_val_batches=2."
    ]


def test_an_epoch_whose_last_step_is_too_small_for_the_ranks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arguments = {"accumulate_grad_batches": 4, "max_epochs": 2, "val_check_interval": 1.0}
    attempt(tmp_path, 2, stop_at=10, **arguments)
    module, ended = attempt(tmp_path, 8, **arguments)
    assert _said(caplog)[1] == (
        "An epoch has 7 steps instead of 8: what was its last one is too small for a batch on each of 1 data-parallel "
        "ranks."
    )
    assert ended["step"] == 14
    assert {len(samples) for samples in module.read.values()} == {8}


def test_another_checkpoint_than_training_goes_on_from(tmp_path: Path) -> None:
    attempt(tmp_path, 4, stop_at=11, max_epochs=1)
    newest, older = CheckpointFolder(tmp_path / "checkpoints").complete()[:2]
    elastic = ElasticRestart(tmp_path / "checkpoints" / older.name)
    with pytest.raises(ResumeError, match=f"was given .*{older.name}, but fit.* goes on from .*{newest.name}"):
        fit(tmp_path, elastic, module=Steady(), data=Rows(batch_size=2), max_epochs=1)
    with pytest.raises(ResumeError, match="two ElasticRestart callbacks"):
        attempt(tmp_path, 2, max_epochs=1, callbacks=[elastic])


def test_another_global_batch_on_purpose(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arguments = {"max_epochs": 1, "val_check_interval": 1.0, "accumulate_grad_batches": 1}
    first, _ = attempt(tmp_path, 4, stop_at=11, **arguments)
    second, ended = attempt(tmp_path, 6, kept="change", **arguments)
    assert _said(caplog)[0].startswith("The global batch changes from 4 (batch size 4 x 1 ")
    before = [each for step in range(10) for each in first.read[step]]
    after = [each for samples in second.read.values() for each in samples]
    assert len(after) == 18, "40 samples were read; whole batches are left"
    assert not set(before) & set(after)
    assert ended["step"] == 13
    assert ("val/loss", 12) in curve(tmp_path / "curve.jsonl"), "the epoch ended as epochs do"


def test_nothing_is_done_where_nothing_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attempt(tmp_path, 4, stop_at=6)
    attempt(tmp_path, 4, limit_train_batches=10)
    assert not _said(caplog)


def test_a_manifest_that_does_not_say_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attempt(tmp_path, 4, stop_at=6)
    for path in (tmp_path / "checkpoints").glob("*.manifest.json"):
        forge(path, global_batch=None)
    attempt(tmp_path, 4)
    assert "does not say its global batch: nothing is done to keep it." in _said(caplog)[0]


class _Cuts(SingleDeviceStrategy):
    """Has the one attribute by which a pipeline is known."""

    micro_batches = 2


def test_a_pipeline_gets_other_batches(tmp_path: Path) -> None:
    whole, expected = attempt(tmp_path / "whole", 4, accumulate_grad_batches=1)
    attempt(tmp_path / "elastic", 4, stop_at=7, accumulate_grad_batches=1)
    strategy = _Cuts("cpu")
    strategy.micro_batches = 3
    module, ended = attempt(tmp_path / "elastic", 6, accumulate_grad_batches=1, strategy=strategy)
    assert strategy.micro_batches == 2, "of two samples each, as three of six were"
    assert all(sorted(samples) == sorted(whole.read[step]) for step, samples in module.read.items())
    assert ended["weights"] == pytest.approx(expected["weights"], rel=CLOSE, abs=CLOSE)


class _NoSize(Numbers):
    """Makes its batches by no attribute."""

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        del self.batch_size
        return loader


def test_a_pipeline_whose_batches_cannot_be_changed(tmp_path: Path) -> None:
    attempt(tmp_path, 4, stop_at=7, accumulate_grad_batches=1)
    elastic = ElasticRestart(checkpoint_to_resume("auto", tmp_path))
    with pytest.raises(
        ResumeError, match=r"needs batches of 4 samples then, in micro_batches=4: give them so, or have"
    ):
        fit(
            tmp_path,
            elastic,
            module=Steady(),
            data=_NoSize(batch_size=2),
            accumulate_grad_batches=1,
            strategy=_Cuts("cpu"),
        )


def test_a_module_that_accumulates_by_itself(tmp_path: Path) -> None:
    attempt(tmp_path, 4, stop_at=7)
    module = Steady()
    module.automatic_optimization = False
    elastic = ElasticRestart(checkpoint_to_resume("auto", tmp_path))
    with pytest.raises(ResumeError, match="the module optimizes manually"):
        fit(tmp_path, elastic, module=module, data=Numbers(batch_size=4), accumulate_grad_batches=1)


def test_a_callback_that_decides_about_accumulation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    decides = {
        "accumulate_grad_batches": 1,
        "callbacks": [GradientAccumulationScheduler({0: 2, 1: 1})],
        "max_epochs": 2,
    }
    attempt(tmp_path, 4, stop_at=20, **decides)
    attempt(tmp_path, 4, stop_at=3, **decides)
    assert not _said(caplog)
    with pytest.raises(ResumeError, match="a GradientAccumulationScheduler says how many"):
        attempt(tmp_path, 2, **decides)


def test_a_script_without_it_is_told_so(recwarn: pytest.WarningsRecorder) -> None:
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    warn_unless_elastic(Trainer(**quiet, callbacks=[ElasticRestart(None)]))
    assert not [each for each in recwarn if "global batch" in str(each.message)]
    with pytest.warns(UserWarning, match=r"nothing keeps its global batch.*Add the callback"):
        warn_unless_elastic(Trainer(**quiet))


def test_a_word_that_is_neither() -> None:
    with pytest.raises(ResumeError, match="global_batch='any', but it is `keep` or `change`"):
        ElasticRestart(None, "any")  # type: ignore[arg-type]


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name.endswith("checkpoint.elastic")]
