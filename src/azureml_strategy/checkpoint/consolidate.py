"""Write the weights of a checkpoint of any known layout into one file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from azureml_strategy.checkpoint.encoding import decode
from azureml_strategy.checkpoint.formats import FORMATS, PIPELINE, ZERO, CheckpointFormat, CheckpointFormatError
from azureml_strategy.checkpoint.module_record import MODULE, merged
from azureml_strategy.checkpoint.serialization import HUGGING_FACE, MOVED, UnsavableStateError, to_plain

# Entries of the training, which belong to a layout and a number of processes. All others are kept, because
# `LightningModule.load_from_checkpoint` reads them, or because hooks of the user's write and read them.
_OF_LIGHTNING = (
    *("loops", "callbacks", "optimizer_states", "lr_schedulers", "native_amp_scaling_state"),
    *("MixedPrecision", "FSDPPrecision"),
    *("datamodule_hyper_parameters", "datamodule_hparams_name", "datamodule_hparams_type"),
)
_OF_DEEPSPEED = (
    *("module", "optimizer", "lr_scheduler", "buffer_names", "param_shapes", "shared_params", "frozen_param_shapes"),
    *("frozen_param_fragments", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"),
    *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
    *("ds_config", "ds_version", "num_experts"),
)
_OURS = "azureml_strategy"  # what entries of ours begin with


def consolidate(
    checkpoint: Path, output: Path, *, trust_pickles: bool = False, overrides: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Write the weights of a checkpoint into one file, in one process and without a GPU.

    `LightningModule.load_from_checkpoint` loads the file. `torch.load` returns a dictionary whose `state_dict` fits the
    module under any strategy. The file holds no optimizer: to resume training, use the checkpoint itself. For
    hyperparameters that torch does not load by itself, such as a Path, call `saved_hyperparameters(output)`.

    Args:
        checkpoint: the path that was given to Lightning, or that Lightning wrote: a file or a folder.
        output: the file to write. It appears complete or not at all.
        trust_pickles: run the code that the checkpoint's files ask for. Files of older versions or of other writers
            may need it; without it, they are refused.
        overrides: what the caller knows of the module, as `module_overrides` makes it.

    Returns:
        The weights by name, on the CPU. The file also holds the extra states of modules.

    Raises:
        CheckpointFormatError: the layout is not known, the output exists, or reading would run code.
    """
    refuse_existing(output)
    content = read_whole(checkpoint, trust_pickles=trust_pickles, overrides=overrides)
    with appearing(output) as part:
        torch.save(content, part)
    return {name: each for name, each in content["state_dict"].items() if isinstance(each, torch.Tensor)}


def read_whole(
    checkpoint: Path, *, trust_pickles: bool = False, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read what `consolidate` writes: weights and all entries that are not of the training alone, in plain form.

    Raises:
        CheckpointFormatError: the layout is not known, reading would run code, or an entry has no plain form.
    """
    layout = checkpoint_format(checkpoint)
    # In any other layout, a hook of the user's has added an entry with a name of DeepSpeed's.
    of_training = (*_OF_LIGHTNING, *(_OF_DEEPSPEED if layout in (ZERO, PIPELINE) else ()))
    read = layout.read(checkpoint, trust_pickles)
    if overrides:
        read = {**read, MODULE: merged(read.get(MODULE), overrides)}

    def is_kept(name: Any) -> bool:
        return name in (MODULE, HUGGING_FACE) or not (name in of_training or str(name).startswith(_OURS))

    moved = [each for each in read.get(MOVED, ()) if is_kept(decode(each["at"])[0])]
    kept = {name: value for name, value in read.items() if is_kept(name)}
    try:
        return to_plain({**kept, "state_dict": dict(read["state_dict"]), MOVED: moved})
    except UnsavableStateError as error:  # another program wrote the checkpoint, and trust_pickles is set
        raise CheckpointFormatError(f"{checkpoint} holds what a file of plain values cannot. {error}") from error


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


def refuse_existing(output: Path) -> None:
    """Refuse to write over what is there.

    Raises:
        CheckpointFormatError: the output exists.
    """
    if output.exists():
        raise CheckpointFormatError(f"{output} exists. Name a file that does not, or delete it first.")


@contextmanager
def appearing(output: Path) -> Iterator[Path]:
    """Give a file to write, which becomes the output when the context ends without an error."""
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(output.name + ".part")
    try:
        yield part
        os.replace(part, output)
    finally:
        part.unlink(missing_ok=True)
