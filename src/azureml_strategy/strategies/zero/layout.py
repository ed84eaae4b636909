"""Refuses a checkpoint of another layout before DeepSpeed opens it."""

from __future__ import annotations

from pathlib import Path

from azureml_strategy.strategies.errors import ConfigurationError, UnfitCheckpointError


def require_zero_checkpoint(checkpoint: Path) -> None:
    """Stop unless the path is a folder that Lightning's DeepSpeed strategy wrote.

    Raises:
        UnfitCheckpointError: it is something else; the message says what, and which strategy reads it.
    """
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
    """Stop where the matrices of a checkpoint are cut over another number of processes.

    Args:
        checkpoint: the folder that Lightning wrote.
        saved: over how many it was.
        size: over how many it is now.

    Raises:
        ConfigurationError: they differ.
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
