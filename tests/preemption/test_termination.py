from __future__ import annotations

import pytest
from lightning.pytorch import Callback, Trainer

from azureml_strategy.interfaces import paused


class Watching(Callback):
    def __init__(self) -> None:
        self.said: list[str] = []

    def pause(self) -> None:
        self.said.append("pause")

    def resume(self) -> None:
        self.said.append("resume")


def test_callbacks_that_can_pause_do_and_go_on_after_an_error() -> None:
    watching = Watching()
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[Callback(), watching], enable_checkpointing=False)
    with paused(trainer):
        assert watching.said == ["pause"]
    assert watching.said == ["pause", "resume"]
    with pytest.raises(RuntimeError), paused(trainer):
        raise RuntimeError
    assert watching.said == ["pause", "resume"] * 2
