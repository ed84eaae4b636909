"""What cannot be repeated after a restart is said when a training starts, once, and nothing else is."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from tests.multiprocess.scripts.noisy import Noisy, Numbers
from torch.utils.data import DataLoader

from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.checkpoint.builtin_callbacks import warn_of_what_is_lost
from azureml_strategy.strategies import AzureMLDDPStrategy
from azureml_strategy.strategies.compression import Compression

QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class _SetsSomething(Callback):
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weight = 0.5


class _ReadsByItself(Noisy):
    def training_step(self, dataloader_iter: Any) -> Any:
        (rows, _), _, _ = next(dataloader_iter)
        return self.network(rows).mean()


def warned(tmp_path: Any, module: LightningModule, loader: Any, *callbacks: Callback) -> list[str]:
    trainer = Trainer(accelerator="cpu", max_steps=1, callbacks=[JobCheckpoint(tmp_path), *callbacks], **QUIET)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader)
    return [str(each.message) for each in caught if "not exactly" in str(each.message)]


def test_nothing_is_said_of_a_plain_training(tmp_path: Any) -> None:
    assert not warned(tmp_path, Noisy(), DataLoader(Numbers().rows, batch_size=2, shuffle=True))


def test_a_hook_that_will_not_be_called_again(tmp_path: Any) -> None:
    (said,) = warned(tmp_path, Noisy(), DataLoader(Numbers().rows, batch_size=2), _SetsSomething())
    assert "_SetsSomething.on_train_epoch_start is not called again" in said


def test_workers_that_live_on(tmp_path: Any) -> None:
    loader = DataLoader(Numbers().rows, batch_size=2, num_workers=1, persistent_workers=True)
    (said,) = warned(tmp_path, Noisy(), loader)
    assert "DataLoader(persistent_workers=True)" in said


def test_a_communication_hook_that_keeps_errors() -> None:
    kinds: tuple[tuple[Compression, int], ...] = (("bf16", 0), ("powersgd", 1))
    for compression, told in kinds:
        strategy = AzureMLDDPStrategy(gradient_compression=compression, find_unused_parameters=True)
        trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False)
        strategy.connect(Noisy())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_what_is_lost(trainer)
        assert sum("PowerSGDState of DDP's communication hook" in str(each.message) for each in caught) == told


def test_a_step_that_reads_by_itself(tmp_path: Any) -> None:
    (said,) = warned(tmp_path, _ReadsByItself(), DataLoader(Numbers().rows, batch_size=2))
    assert "training_step(self, dataloader_iter)" in said
