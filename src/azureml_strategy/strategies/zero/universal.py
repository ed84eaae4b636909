"""Checks which layout of ranks can read a DeepSpeed checkpoint, and converts checkpoints to the universal form."""

from __future__ import annotations

import shutil
from argparse import Namespace
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path

import torch
from torch.optim import Optimizer

from azureml_strategy.strategies.errors import ConfigurationError, UnfitCheckpointError

# Lightning's name for the folder of the shards, and our name for the folder of the converted shards beside it.
_SHARDS, _UNIVERSAL = "checkpoint", "checkpoint_universal"
# The versions whose universal checkpoints `correct_stage_3` knows.
_CORRECTED = "0.19."
# DeepSpeed writes this file last, so it marks a complete conversion.
_COMPLETE = "latest_universal"


def require_zero_checkpoint(checkpoint: Path) -> None:
    """Check that a path is a folder that Lightning's DeepSpeed strategy wrote; the error says which one reads it."""
    shards = checkpoint / "checkpoint"
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
    """Check that a checkpoint's matrices are cut over as many processes as in this run.

    Args:
        checkpoint: the folder that Lightning wrote.
        saved: tensor-parallel size of the checkpoint.
        size: tensor-parallel size of this run.
    """
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
    """Return how many processes wrote the optimizer shards of a checkpoint.

    Args:
        checkpoint: the folder that Lightning wrote.
    """
    return len(_optimizer_shards(checkpoint))


def saved_slices(checkpoint: Path) -> int:
    """Return over how many processes the matrices of a checkpoint are cut: its `tensor_parallel_size`.

    Args:
        checkpoint: the folder that Lightning wrote.
    """
    return len({file.name.partition("mp_rank_")[2][:2] for file in _optimizer_shards(checkpoint)})


def remove_previous_files(checkpoint: Path) -> None:
    """Remove the files that a previous save to the same path left, and nothing else. Any process may call it.

    DeepSpeed overwrites only the files of the current processes. The files of a previous save with more processes
    would remain, and so would its converted form: later runs would resume from an old step, or from a mixture.

    Args:
        checkpoint: the folder that is about to be written.
    """
    (checkpoint / _COMPLETE).unlink(missing_ok=True)
    for file in (checkpoint / _SHARDS).glob("*_states.pt"):
        file.unlink(missing_ok=True)
    shutil.rmtree(checkpoint / _UNIVERSAL, ignore_errors=True)


def require_convertible(checkpoint: Path) -> None:
    """Refuse a checkpoint that DeepSpeed cannot convert: of no optimizer of Adam's family, or cut by AutoTP.

    All processes call it, so that none waits for one that has stopped.

    Args:
        checkpoint: the folder that Lightning wrote.
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

    The universal form takes as much space as the shards. Any number of processes can load it.

    Args:
        checkpoint: the folder that Lightning wrote, after `require_convertible` has accepted it.
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
        optimizer: the optimizer inside DeepSpeed's, just loaded.
        checkpoint: the folder that Lightning wrote, after its conversion.

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


def _optimizer_shards(checkpoint: Path) -> list[Path]:
    return sorted((checkpoint / _SHARDS).glob("*_optim_states.pt"))
