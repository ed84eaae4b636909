"""What the tests of `JobCheckpoint` share: short fits, and a checkpoint that is asked for."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer

from azureml_strategy.checkpoint import JobCheckpoint

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
IN_BACKGROUND = {"monitor": None, "every_n_train_steps": 4}
QUICK = {"logger": False, "limit_val_batches": 0, "max_epochs": 1}


class SaveNow(Callback):
    """Asks for a checkpoint between two steps, as the notice of a preemption does."""

    def __init__(self) -> None:
        self.paths: list[str | None] = []

    def on_step_boundary(self, trainer: Trainer) -> None:
        if trainer.global_step == 7:
            saver = trainer.checkpoint_callback
            assert isinstance(saver, JobCheckpoint)
            self.paths += [saver.save_now(trainer, "preempted"), saver.save_now(trainer, "preempted")]


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in arguments.items()}
