"""Lightning's DeepSpeed strategy whose checkpoints can be written later than they are taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy
from typing_extensions import override

from azureml_strategy.checkpoint.checkpoint_io import WriteStaged
from azureml_strategy.checkpoint.plain_data import WRITTEN_APART, PlainDataStrategy, to_plain
from azureml_strategy.control.gather import Exchange
from azureml_strategy.strategies.zero.device import AnyDeviceDeepSpeedStrategy


class StagedDeepSpeedStrategy(PlainDataStrategy, AnyDeviceDeepSpeedStrategy):
    """Lightning's strategy, but it can hand out the files of a checkpoint instead of writing them."""

    @property
    @override
    def written_apart(self) -> tuple[str, ...]:
        return WRITTEN_APART

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None) -> None:
        super().save_checkpoint(to_plain(checkpoint, WRITTEN_APART), filepath, storage_options)

    def stage_checkpoint(self, checkpoint: dict[str, Any]) -> tuple[Any, WriteStaged] | None:
        """Collect what this rank is to write; a collective.

        Args:
            checkpoint: as Lightning gives it to `save_checkpoint`.

        Returns:
            What to copy, and what writes the copy; None where DeepSpeed has to write it at once: states on an NVMe
            disk, or a writer of the user's DeepSpeed configuration.
        """
        from azureml_strategy.strategies.zero.staging import can_be_collected, collect

        if not can_be_collected(self.deepspeed_engine):
            return None

        def save(folder: str) -> None:
            DeepSpeedStrategy.save_checkpoint(self, checkpoint, folder)

        files, write_files = collect(self.deepspeed_engine, save)

        def write(content: Any, path: Path, exchange: Exchange) -> None:
            exchange.together(lambda: write_files(content, path))

        return files, write
