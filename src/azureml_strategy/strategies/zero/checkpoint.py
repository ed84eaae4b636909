"""Checkpoints of ZeRO: staged first and written later, and loaded on another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from azureml_strategy.checkpoint.plain_data import WRITTEN_APART, PlainDataStrategy, run_objects, to_plain
from azureml_strategy.control.gather import Exchange, on_rank_zero
from azureml_strategy.control.store import StepError
from azureml_strategy.interfaces import WriteStaged, paused
from azureml_strategy.strategies.deepspeed_internals import load_universal_checkpoint
from azureml_strategy.strategies.equal_buffers import EqualBuffersStrategy
from azureml_strategy.strategies.errors import UnfitCheckpointError
from azureml_strategy.strategies.mixed_precision import MixedPrecisionStrategy
from azureml_strategy.strategies.zero import universal
from azureml_strategy.strategies.zero.device import AnyDeviceDeepSpeedStrategy
from azureml_strategy.strategies.zero.precision import BufferedGradientsStrategy
from azureml_strategy.strategies.zero.training import WatchedTrainingStrategy
from azureml_strategy.strategies.zero.universal import require_same_slices, require_zero_checkpoint


class StagedDeepSpeedStrategy(
    PlainDataStrategy,
    EqualBuffersStrategy,
    MixedPrecisionStrategy,
    BufferedGradientsStrategy,
    WatchedTrainingStrategy,
    AnyDeviceDeepSpeedStrategy,
):
    """Lightning's DeepSpeed strategy, but it can hand out the files of a checkpoint instead of writing them."""

    @property
    @override
    def written_apart(self) -> tuple[str, ...]:
        return WRITTEN_APART

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        self.take_edits()
        super().save_checkpoint(to_plain(checkpoint, WRITTEN_APART, run_objects(self)), filepath, storage_options)

    def stage_checkpoint(self, checkpoint: dict[str, Any]) -> tuple[Any, WriteStaged] | None:
        """Collect what this rank has to write. This is a collective.

        Args:
            checkpoint: as Lightning gives it to `save_checkpoint`.

        Returns:
            What to copy, and a function that writes the copy. None if DeepSpeed must write the checkpoint at once:
            with states on an NVMe disk, or with a checkpoint writer in the user's DeepSpeed configuration.
        """
        from azureml_strategy.strategies.zero.collecting_engine import can_be_collected, collect

        if not can_be_collected(self.deepspeed_engine):
            return None
        self.equal_before_use()
        self.take_edits()

        def save(folder: str) -> None:
            DeepSpeedStrategy.save_checkpoint(self, checkpoint, folder)

        files, write_files = collect(self.deepspeed_engine, save)

        def write(content: Any, path: Path, exchange: Exchange) -> None:
            exchange.on_all_ranks(lambda: write_files(content, path))

        return files, write


class AnyWorldDeepSpeedStrategy(StagedDeepSpeedStrategy):
    """Lightning's DeepSpeed strategy, but another number of processes can load a checkpoint."""

    # Number of processes that share each matrix.
    _tensor_parallel_size = 1

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        filepath = self.broadcast(filepath)
        if self.local_rank == 0:  # on each node: the folder may be on its local disk
            universal.remove_previous_files(Path(filepath))
        self.barrier()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        if self.load_full_weights and self.zero_stage_3:
            return super().load_checkpoint(checkpoint_path, weights_only)
        checkpoint = Path(checkpoint_path)
        require_zero_checkpoint(checkpoint)
        require_same_slices(checkpoint, universal.saved_slices(checkpoint), self._tensor_parallel_size)
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if self.zero_stage_3 and not fitting:
            return self._load_weights_in_parts(checkpoint)
        saved = universal.saved_processes(checkpoint)
        if not fitting or saved == self.world_size:
            return super().load_checkpoint(checkpoint_path, weights_only)
        rank_zero_info(f"{checkpoint} was saved by {saved} process(es): converting it for {self.world_size}.")
        universal.require_convertible(checkpoint)
        self._on_rank_zero(checkpoint, lambda: universal.convert(checkpoint))
        load_universal_checkpoint(self.deepspeed_engine)
        loaded = super().load_checkpoint(checkpoint_path, weights_only)
        if self.zero_stage_3:
            universal.correct_stage_3(self.deepspeed_engine.optimizer.optimizer, checkpoint)
        return loaded

    def _on_rank_zero(self, checkpoint: Path, work: Callable[[], None]) -> None:
        """Have rank 0 read a whole checkpoint, which may take longer than a collective or the hang watch waits."""
        assert self.lightning_module is not None
        try:
            with paused(self.lightning_module.trainer):
                on_rank_zero(type(self).__name__, self.global_rank, self.world_size, work)
        except StepError as error:
            raise UnfitCheckpointError(
                f"Rank 0 cannot read the checkpoint {checkpoint} for the other ranks: {error}. Use an earlier one, "
                f"or resume with as many processes as wrote it, {universal.saved_processes(checkpoint)}."
            ) from error

    def _load_weights_in_parts(self, checkpoint: Path) -> dict[str, Any]:
        """Load the weights of a stage 3 checkpoint for evaluation. DeepSpeed itself needs an optimizer for that.

        Rank 0 holds the float32 weights in host memory while it hands them out, layer by layer.
        """
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        assert self.lightning_module is not None
        weights: dict[str, Any] = {}
        path = str(checkpoint)
        self._on_rank_zero(checkpoint, lambda: weights.update(get_fp32_state_dict_from_zero_checkpoint(path)))
        self._restore_zero_state({"state_dict": weights}, strict=self.lightning_module.strict_loading)
        for buffer in self.lightning_module.buffers():
            dist.broadcast(buffer, src=0)
        states = next((checkpoint / "checkpoint").glob("*_model_states.pt"))
        saved: dict[str, Any] = torch.load(states, map_location="cpu", mmap=True, weights_only=False)
        return saved
