from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from tests.profiling.test_callback import fit

from azureml_strategy.cli import main
from azureml_strategy.profiling import ProfileSteps


class Until(Callback):
    """Ends the training when something is done."""

    def __init__(self, done: Future[int]) -> None:
        self.done = done

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = self.done.done()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--steps", "2", "--shapes"], 0, "profile/trace_rank_0_steps_"),
        (["--ranks", "3"], 1, "refused: ranks=3: there is no rank 3."),
    ],
)
def test_a_running_training_is_asked(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor() as thread:
        asked = thread.submit(main, ["profile", ".", *words, "--timeout", "100"])
        fit(ProfileSteps(), Until(asked), steps=-1)
    assert asked.result() == code
    assert said in capsys.readouterr().out
    assert len(list(Path("profile").glob("trace*.json.gz"))) == 1 - code


def test_nobody_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(tmp_path / "none")]) == 2
    assert "There is no folder" in capsys.readouterr().err
    assert main(["profile", str(tmp_path), "--timeout", "0"]) == 2
    assert "has not been taken, and is withdrawn: does a job with ProfileSteps run there?" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []  # or else the next job there would take the request
    (tmp_path / "profile.request").touch()
    assert main(["profile", str(tmp_path)]) == 2
    assert "waits to be taken already" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / f".profile.request.{os.getpid()}.part").mkdir()
    assert main(["profile", str(tmp_path)]) == 2
    assert "profile.request cannot be written (Is a directory)." in capsys.readouterr().err
