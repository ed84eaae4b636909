"""Checkpoints of ZeRO: staged first and written later, converted to the universal form, and loaded on another number of
ranks. The path of a checkpoint is the folder that Lightning wrote.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from azureml_strategy.checkpoint.serialization import WRITTEN_APART, PlainDataStrategy, run_objects, to_plain
from azureml_strategy.control.gather import Exchange, on_rank_zero
from azureml_strategy.control.store import StepError
from azureml_strategy.interfaces import WriteStaged, paused
from azureml_strategy.strategies.deepspeed_internals import load_universal_checkpoint
from azureml_strategy.strategies.equal_buffers import EqualBuffersStrategy
from azureml_strategy.strategies.errors import ConfigurationError, UnfitCheckpointError
from azureml_strategy.strategies.mixed_precision import MixedPrecisionStrategy
from azureml_strategy.strategies.zero.device import AnyDeviceDeepSpeedStrategy
from azureml_strategy.strategies.zero.gradients import WatchedTrainingStrategy

# Lightning's name for the folder of the shards, and ours for the folder of the converted shards beside it.
_SHARDS, _UNIVERSAL = "checkpoint", "checkpoint_universal"
# The versions whose universal checkpoints `correct_stage_3` knows.
_CORRECTED = "0.19."
# DeepSpeed writes this file last, so it marks a complete conversion.
_COMPLETE = "latest_universal"


def require_zero_checkpoint(checkpoint: Path) -> None:
    """Check that a path is a folder that Lightning's DeepSpeed strategy wrote; the error says which one reads it."""
    shards = checkpoint / _SHARDS
    if any(shards.glob("layer_*-model_states.pt")):
        raise UnfitCheckpointError(_refusal(checkpoint, "written by a pipeline", "azureml_deepspeed_pipeline"))
    if any(shards.glob("*_optim_states.pt")):
        return
    if (checkpoint / ".metadata").is_file():
        raise UnfitCheckpointError(
            _refusal(checkpoint, "one of torch.distributed.checkpoint", "azureml_model_parallel")
        )
    if (checkpoint.parent / "latest").is_file():
        raise UnfitCheckpointError(
            f"{checkpoint} is a part of a DeepSpeed checkpoint. Give the whole: {checkpoint.parent}"
        )
    if checkpoint.is_file():
        raise UnfitCheckpointError(
            f"{_refusal(checkpoint, 'a single file', 'azureml_ddp')} Under ZeRO-3 "
            "AzureMLDeepSpeedStrategy(stage=3, load_full_weights=True) takes its weights, without the optimizer."
        )
    raise UnfitCheckpointError(
        f"There is no DeepSpeed checkpoint at {checkpoint}. Give the folder that the Trainer wrote."
    )


def require_same_slices(checkpoint: Path, saved: int, size: int) -> None:
    """Check that a checkpoint and this run have the same tensor-parallel size, `saved` and `size`."""
    if saved != size:
        raise ConfigurationError(
            f"{checkpoint} was saved with tensor_parallel_size={saved}, but this run has {size}, and each file holds "
            f"slices of that size. Write tensor_parallel_size={saved}."
        )


def _refusal(checkpoint: Path, kind: str, strategy: str) -> str:
    return (
        f"{checkpoint} is {kind}, and ZeRO reads only folders of its own. Resume with strategy={strategy!r}, or start "
        f"from the weights alone: azureml-strategy consolidate {checkpoint} weights.ckpt, then "
        "YourModule.load_from_checkpoint('weights.ckpt')."
    )


def saved_processes(checkpoint: Path) -> int:
    """Return how many processes wrote the optimizer shards of a checkpoint."""
    return len(_optimizer_shards(checkpoint))


def saved_slices(checkpoint: Path) -> int:
    """Return over how many processes the matrices of a checkpoint are cut: its `tensor_parallel_size`."""
    return len({file.name.partition("mp_rank_")[2][:2] for file in _optimizer_shards(checkpoint)})


def remove_previous_files(checkpoint: Path) -> None:
    """Remove the files that a previous save to the same path left, and nothing else. Any process may call it.

    DeepSpeed overwrites only the files of the current processes. The files of a previous save with more processes
    would remain, and so would its converted form: later runs would resume from an old step, or from a mixture.
    """
    (checkpoint / _COMPLETE).unlink(missing_ok=True)
    for file in (checkpoint / _SHARDS).glob("*_states.pt"):
        file.unlink(missing_ok=True)
    shutil.rmtree(checkpoint / _UNIVERSAL, ignore_errors=True)


def require_convertible(checkpoint: Path) -> None:
    """Refuse a checkpoint that DeepSpeed cannot convert: of no optimizer of Adam's family, or cut by AutoTP.

    All processes call it, so that none waits for one that has stopped.
    """
    saved = saved_processes(checkpoint)
    if saved_slices(checkpoint) > 1:
        raise ConfigurationError(
            f"{checkpoint} was saved by {saved} processes with tensor_parallel_size={saved_slices(checkpoint)}, and "
            f"DeepSpeed joins only what ZeRO cut. Use the same tensor_parallel_size and {saved} processes."
        )
    states = torch.load(_optimizer_shards(checkpoint)[0], map_location="cpu", mmap=True, weights_only=False)
    state = states["optimizer_state_dict"]
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))["state"]
    names = set(next(iter(base.values()), {}))
    if not {"exp_avg", "exp_avg_sq"} <= names:
        raise ConfigurationError(
            f"{checkpoint} was saved by {saved} process(es), and DeepSpeed converts only the "
            f"states of Adam's family to another number; this optimizer keeps {sorted(names)}. Resume with as many "
            f"processes, or start from its weights alone: azureml-strategy consolidate {checkpoint} weights.ckpt"
        )


def convert(checkpoint: Path) -> None:
    """Write the universal form of a checkpoint beside its shards, unless it exists. One process calls it.

    `require_convertible` must have accepted the checkpoint. The universal form takes as much space as the shards. Any
    number of processes can load it.
    """
    if (checkpoint / _COMPLETE).is_file():
        return
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        Namespace(
            input_folder=str(checkpoint / _SHARDS),
            output_folder=str(checkpoint / _UNIVERSAL),
            num_extract_workers=1,  # in this process: workers of a pool would need the CUDA of their parent
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,  # other checkpoints lack Megatron's patterns of tied and cut parameters
        )
    )


def correct_stage_3(optimizer: Optimizer, checkpoint: Path) -> None:
    """Correct what DeepSpeed 0.19 restores wrongly from a universal checkpoint under stage 3.

    DeepSpeed gives all parameter groups the hyperparameters of the first group, including weight decay. It also gives
    all parts of the state one shared step tensor, which then counts each step once per part.

    Args:
        optimizer: inside of DeepSpeed's, just loaded.
        checkpoint: converted.

    Raises:
        ConfigurationError: another DeepSpeed is installed, which may restore other things wrongly.
    """
    installed = version("deepspeed")
    if not installed.startswith(_CORRECTED):
        raise ConfigurationError(
            f"Resuming ZeRO stage 3 on another number of processes is known to be right with DeepSpeed {_CORRECTED}* "
            f"only, and {installed} is installed. Type pip install 'deepspeed=={_CORRECTED}*', or resume with as many "
            "processes as before."
        )
    state = checkpoint / _UNIVERSAL / "zero" / "optimizer_state.pt"
    saved = torch.load(state, map_location="cpu", mmap=True, weights_only=False)["optimizer_state_dict"]
    for group, hyperparameters in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({name: value for name, value in hyperparameters.items() if name != "params"})
    for part in optimizer.state.values():
        part["step"] = deepcopy(part["step"])


def keep_kernels(optimizer: Optimizer, fused: list[bool | None]) -> None:
    """Give an optimizer its own `fused` again, and its steps to the device where such a kernel reads them.

    DeepSpeed sets the state of a universal checkpoint past `load_state_dict`, with steps on the host.

    Args:
        optimizer: inside of DeepSpeed's, just loaded.
        fused: of its groups, before.
    """
    for group, own in zip(optimizer.param_groups, fused, strict=True):
        if "fused" in group:
            group["fused"] = own
        for parameter in group["params"] if own else ():
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(parameter.device)


def _optimizer_shards(checkpoint: Path) -> list[Path]:
    return sorted((checkpoint / _SHARDS).glob("*_optim_states.pt"))


class StagedDeepSpeedStrategy(
    PlainDataStrategy,
    EqualBuffersStrategy,
    MixedPrecisionStrategy,
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
        """Collect what this rank has to write of what Lightning gives to `save_checkpoint`. This is a collective.

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

    _tensor_parallel_size = 1  # number of processes that share each matrix

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        filepath = self.broadcast(filepath)
        if self.local_rank == 0:  # on each node: the folder may be on its local disk
            remove_previous_files(Path(filepath))
        self.barrier()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        if self.load_full_weights and self.zero_stage_3:
            return super().load_checkpoint(checkpoint_path, weights_only)
        checkpoint = Path(checkpoint_path)
        require_zero_checkpoint(checkpoint)
        require_same_slices(checkpoint, saved_slices(checkpoint), self._tensor_parallel_size)
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if self.zero_stage_3 and not fitting:
            return self._load_weights_in_parts(checkpoint)
        saved = saved_processes(checkpoint)
        if not fitting or saved == self.world_size:
            return super().load_checkpoint(checkpoint_path, weights_only)
        self._convert(checkpoint, saved)
        optimizer = self.deepspeed_engine.optimizer.optimizer
        fused = [group.get("fused") for group in optimizer.param_groups]
        loaded = super().load_checkpoint(checkpoint_path, weights_only)
        if self.zero_stage_3:
            correct_stage_3(optimizer, checkpoint)
        keep_kernels(optimizer, fused)
        return loaded

    def _convert(self, checkpoint: Path, saved: int) -> None:
        rank_zero_info(f"{checkpoint} was saved by {saved} process(es): converting it for {self.world_size}.")
        require_convertible(checkpoint)
        self._on_rank_zero(checkpoint, lambda: convert(checkpoint))
        load_universal_checkpoint(self.deepspeed_engine)

    def _on_rank_zero(self, checkpoint: Path, work: Callable[[], None]) -> None:
        """Have rank 0 read a whole checkpoint. It may take longer than a collective or the hang watch waits."""
        assert self.lightning_module is not None
        try:
            with paused(self.lightning_module.trainer):
                on_rank_zero(type(self).__name__, self.global_rank, self.world_size, work)
        except StepError as error:
            raise UnfitCheckpointError(
                f"Rank 0 cannot read the checkpoint {checkpoint} for the other ranks: {error}. Use an earlier one, "
                f"or resume with as many processes as wrote it, {saved_processes(checkpoint)}."
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
        states = next((checkpoint / _SHARDS).glob("*_model_states.pt"))
        saved: dict[str, Any] = torch.load(states, map_location="cpu", mmap=True, weights_only=False)
        return saved
