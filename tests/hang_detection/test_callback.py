from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from azureml_strategy.control import roll_call
from azureml_strategy.hang_detection import HangWatch
from azureml_strategy.hang_detection.callback import _is_failure, _kills
from azureml_strategy.hang_detection.main_thread import START, TRAINING, Progress
from azureml_strategy.hang_detection.watch import Failure


class Told:
    """A watch that keeps what it is told."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.closed = False

    def fail(self, failure: Failure) -> None:
        self.failures.append(failure)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def callback(monkeypatch: pytest.MonkeyPatch) -> HangWatch:
    monkeypatch.setattr(roll_call, "_members", [])  # of another test of this process
    callback = HangWatch()
    callback._watch, callback._progress = Told(), Progress(600, 1800)  # type: ignore[assignment]
    return callback


def test_a_start_that_was_suspended_goes_on_as_a_start(callback: HangWatch) -> None:
    """As while rank 0 converts a checkpoint: what follows is the first batch, which may take longer than others."""
    progress = callback._progress
    assert progress is not None
    progress.batch_done(TRAINING)  # of a validation before the fit
    progress.phase = START
    callback.pause()
    assert progress.limit_s == float("inf")
    callback.resume()
    assert (progress.phase, progress.limit_s) == (START, 1800)
    progress.note(TRAINING)
    callback.pause()
    callback.resume()
    assert progress.phase == TRAINING


@pytest.mark.parametrize(
    ("exception", "failure"),
    [
        (ValueError("no labels"), True),
        (SystemExit(1), True),
        (SystemExit("no labels"), True),
        (SystemExit(0), False),
        (SystemExit(), False),
        (SIGTERMException(143), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_a_rank_must_tell_the_others(exception: BaseException, failure: bool) -> None:
    assert _is_failure(exception) is failure


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_only_torch_speaks_of_other_ranks(callback: HangWatch, kind: type[Exception]) -> None:
    told: Any = callback._watch
    callback.on_exception(None, None, kind("Connection reset by peer"))  # type: ignore[arg-type]
    assert [each.of_others for each in told.failures] == [kind is RuntimeError]
    assert callback._progress is not None, "a checkpoint on the way out is still noted"


def test_a_signal_is_no_failure(callback: HangWatch) -> None:
    told: Any = callback._watch
    callback.on_exception(None, None, KeyboardInterrupt())  # type: ignore[arg-type]
    assert told.closed
    assert told.failures == []


@pytest.mark.parametrize(
    ("given", "timeout_s", "limits"),
    [
        (None, 1800, (600, 1800)),
        (None, 60, (600, 1800)),
        (None, 7200, (2400, 7200)),
        (5.0, 1800, (5, 1800)),
        (0, 1800, (float("inf"), float("inf"))),
    ],
)
def test_limits(given: float | None, timeout_s: float, limits: tuple[float, float]) -> None:
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(_timeout=timedelta(seconds=timeout_s)))
    assert HangWatch(stall_after_s=given)._limits(trainer) == limits


@pytest.mark.parametrize(("fn", "limit_s"), [(TrainerFn.FITTING, 1800), (TrainerFn.VALIDATING, 600)])
def test_a_validation_within_a_fit_does_not_end_its_start(callback: HangWatch, fn: TrainerFn, limit_s: float) -> None:
    trainer: Any = SimpleNamespace(state=SimpleNamespace(fn=fn))
    callback.on_validation_batch_end(trainer)
    callback._note("training")
    assert callback._progress is not None
    assert callback._progress.limit_s == limit_s


@pytest.mark.parametrize(("value", "kills"), [(None, False), ("report", False), ("KILL ", True), ("off", False)])
def test_the_environment_says_whether_a_hang_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, value: str | None, kills: bool
) -> None:
    monkeypatch.delenv("AZUREML_STRATEGY_HANG_WATCH", raising=False)
    if value is not None:
        monkeypatch.setenv("AZUREML_STRATEGY_HANG_WATCH", value)
    assert _kills() is kills


def test_a_value_that_is_none_warns_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZUREML_STRATEGY_HANG_WATCH", "yes")
    with pytest.warns(UserWarning, match="HANG_WATCH='yes' is none of off, report, kill"):
        assert _kills() is False
