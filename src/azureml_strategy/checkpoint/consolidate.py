"""Write the weights of a checkpoint of any known layout into one file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from azureml_strategy.checkpoint.formats import FORMATS, CheckpointFormat, CheckpointFormatError
from azureml_strategy.checkpoint.plain_coding import decode
from azureml_strategy.checkpoint.plain_data import HUGGING_FACE, MOVED, to_plain

# The entries that `LightningModule.load_from_checkpoint` reads, and those that say where in the training the weights
# are from. Optimizers, loops and callbacks are left out: they belong to a layout and a number of processes.
_KEPT = (
    *("epoch", "global_step", "pytorch-lightning_version"),
    *("hyper_parameters", "hparams_name", "hparams_type"),
    HUGGING_FACE,
)


def consolidate(checkpoint: Path, output: Path, *, trust_pickles: bool = False) -> dict[str, torch.Tensor]:
    """Write the weights of a checkpoint into one file, in one process and without a GPU.

    `LightningModule.load_from_checkpoint` loads the file. `torch.load` returns a dictionary whose `state_dict` fits the
    module under any strategy. The file holds no optimizer: to resume training, use the checkpoint itself. For
    hyperparameters that torch does not load by itself, such as a Path, call `saved_hyperparameters(output)`.

    Args:
        checkpoint: the path that was given to Lightning, or that Lightning wrote: a file or a folder.
        output: the file to write. It appears complete or not at all.
        trust_pickles: run the code that the checkpoint's files ask for. Files of older versions or of other writers
            may need it; without it, they are refused.

    Returns:
        The weights by name, on the CPU.

    Raises:
        CheckpointFormatError: the layout is not known, the output exists, or reading would run code.
    """
    found = checkpoint_format(checkpoint)
    if output.exists():
        raise CheckpointFormatError(f"{output} exists. Name a file that does not, or delete it first.")
    read = found.read(checkpoint, trust_pickles)
    weights: dict[str, torch.Tensor] = dict(read["state_dict"])
    moved = [each for each in read.get(MOVED, ()) if decode(each["at"])[0] in _KEPT]
    kept = {name: read[name] for name in _KEPT if name in read}
    _write(to_plain({"state_dict": weights, **kept, MOVED: moved}), output)
    return weights


def checkpoint_format(checkpoint: Path) -> CheckpointFormat:
    """Detect the layout of a checkpoint from the files on disk.

    Raises:
        CheckpointFormatError: the path does not exist, or has no known layout.
    """
    for each in FORMATS:
        if each.found(checkpoint):
            return each
    if not checkpoint.exists():
        raise CheckpointFormatError(f"There is no {checkpoint}. Give the path of a checkpoint, a file or a folder.")
    if (checkpoint.parent / "latest").is_file():
        raise CheckpointFormatError(f"{checkpoint} is a part of a DeepSpeed checkpoint. Give {checkpoint.parent}.")
    raise CheckpointFormatError(
        f"{checkpoint} is a folder, but no checkpoint that is known here: {', '.join(each.name for each in FORMATS)}. "
        "Give the folder that the Trainer wrote, such as checkpoints/epoch=2-step=66.ckpt."
    )


def _write(content: dict[str, Any], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(output.name + ".part")
    torch.save(content, part)
    os.replace(part, output)
