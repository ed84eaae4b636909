"""Writes a folder that `from_pretrained` of transformers or peft opens, from a checkpoint of any strategy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from azureml_strategy.checkpoint.consolidate import checkpoint_format
from azureml_strategy.checkpoint.formats import CheckpointFormatError
from azureml_strategy.huggingface.assembly import adapted, skeleton, whole
from azureml_strategy.huggingface.record import CheckpointRecord, ModelRecord, files_beside, model_of_source
from azureml_strategy.huggingface.transformers_internals import (
    buffers_in_float32,
    find_models,
    find_peft_models,
    parameters_in_float32,
)

# Written as it was recorded: transformers refuses to write settings that contradict each other, as those of some models
# on the hub do, and reads them all the same.
_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class ExportOptions:
    """How to write a folder.

    Attributes:
        module: name of the model in the LightningModule, if it has several.
        source: folder or hub id of the configuration, the tokenizer and, for `merge`, the base, instead of those that
            the checkpoint tells of.
        merge: write the base with the adapters added to its weights, instead of the adapters alone.
        dtype: of the weights in the folder, such as `bfloat16`; None for that of the training.
        max_shard_size: the largest file of weights, as transformers reads it, such as `5GB`; None for its own limit.
        trust_pickles: run the code that the checkpoint's files ask for.
    """

    module: str | None = None
    source: str | None = None
    merge: bool = False
    dtype: str | None = None
    max_shard_size: str | None = None
    trust_pickles: bool = False


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        kind: class of the model.
        tensors: how many weights.
        numbers: how many numbers in them.
        left: names of the module's weights that belong to no part of the folder.
        tokenizer: whether there was one.
    """

    kind: str
    tensors: int
    numbers: int
    left: list[str]
    tokenizer: bool


def write_hugging_face(checkpoint: Path, output: Path, options: ExportOptions | None = None) -> Exported:
    """Write a model of a checkpoint as a folder for `from_pretrained`, in one process and without a GPU.

    The weights are in memory once; those of a single file stay on disk until they are written.

    Args:
        checkpoint: the path that was given to Lightning, or that Lightning wrote: a file or a folder.
        output: the folder. It appears complete or not at all.
        options: see there.

    Raises:
        CheckpointFormatError: the output exists; the checkpoint has no known layout, tells of no such model, or lacks
            some of its weights; or the base is not the one that the adapters were trained on.
    """
    options = options or ExportOptions()
    if output.exists():
        raise CheckpointFormatError(f"{output} exists. Name a folder that does not, or delete it first.")
    read = checkpoint_format(checkpoint).read(checkpoint, options.trust_pickles)
    weights: dict[str, Tensor] = dict(read.pop("state_dict"))
    record = _with_source(CheckpointRecord.of(read), checkpoint, weights, options)
    chosen = _choose_model(record.models, options.module, checkpoint)
    model: nn.Module
    if chosen.adapters is None:
        model, own = whole(chosen, weights, checkpoint)
    else:
        model, own = adapted(chosen, chosen.adapters, record.base, weights, checkpoint, options.merge, options.source)
    left = sorted(weights.keys() - own)
    weights.clear()  # so that each weight is freed as soon as it is converted
    if options.dtype is not None:
        _cast(model, getattr(torch, options.dtype))
    with _written_whole(output) as folder:
        adapters = find_peft_models(model).get("")
        if adapters is not None:
            adapters.save_pretrained(str(folder), save_embedding_layers=False)
        else:
            limit = {} if options.max_shard_size is None else {"max_shard_size": options.max_shard_size}
            for each in find_models(model).values():
                each.save_pretrained(folder, **limit)  # type: ignore[arg-type]
        if chosen.generation_config is not None and (folder / _GENERATION).is_file():
            (folder / _GENERATION).write_text(chosen.generation_config)
        for name, content in record.tokenizer.items():
            (folder / name).write_bytes(content.numpy().tobytes())
    held = [each for name, each in model.named_parameters() if not each.is_meta]
    return Exported(chosen.kind, len(held), sum(each.numel() for each in held), left, bool(record.tokenizer))


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a model but for what transformers keeps in float32 when it reads the folder."""
    weights = [(each, each.detach()) for each in parameters_in_float32(model, dtype).values()]
    buffers = [(owner, name, owner.get_buffer(name)) for owner, name in buffers_in_float32(model, dtype)]
    model.to(dtype)
    for parameter, values in weights:
        parameter.data = values
    for owner, name, values in buffers:
        owner._buffers[name] = values


def _with_source(
    record: CheckpointRecord | None, checkpoint: Path, weights: Mapping[str, Tensor], options: ExportOptions
) -> CheckpointRecord:
    """Return the checkpoint's record, completed or replaced by what `--model` names."""
    if options.source is None:
        if record is None:
            raise CheckpointFormatError(
                f"{checkpoint} does not tell which transformers model is in it: it holds none, or was not written by a "
                "strategy of azureml-strategy. Name a folder or hub id with the same configuration: --model FOLDER."
            )
        return record
    if record is None:
        model = model_of_source(options.source)
        prefix = options.module if options.module is not None else _prefix_of(model, weights, checkpoint)
        record = CheckpointRecord((replace(model, prefix=prefix),), None, {})
    if record.tokenizer:
        return record
    return replace(record, tokenizer=files_beside(options.source, None))


def _prefix_of(model: ModelRecord, weights: Mapping[str, Tensor], checkpoint: Path) -> str:
    """Find the name under which all of a model's weights are in the module."""
    names = list(skeleton(model).state_dict())
    starts = {each.removesuffix(names[0]) for each in weights if each.endswith(names[0])}
    fit = [start for start in sorted(starts) if all(start + name in weights for name in names)]
    if len(fit) != 1:
        raise CheckpointFormatError(
            f"{checkpoint} holds the weights of a {model.kind} under {len(fit)} names. "
            + (f"Choose one: --module {fit[0].removesuffix('.')}" if fit else "Give --model the model's own folder.")
        )
    return fit[0].removesuffix(".")


def _choose_model(models: tuple[ModelRecord, ...], module: str | None, checkpoint: Path) -> ModelRecord:
    names = {each.name: each for each in models}
    if module is None and len(models) == 1:
        return models[0]
    if module in names:
        return names[module]
    raise CheckpointFormatError(
        f"{checkpoint} has {len(models)} transformers models: {', '.join(names)}. Choose one: "
        f"--module {next(iter(names))}"
    )


@contextmanager
def _written_whole(output: Path) -> Iterator[Path]:
    """Yield a folder to write to, which gets its name when it is complete."""
    part = output.with_name(output.name + ".part")
    shutil.rmtree(part, ignore_errors=True)  # what an interrupted call has left
    part.mkdir(parents=True)
    try:
        yield part
        os.replace(part, output)
    finally:
        shutil.rmtree(part, ignore_errors=True)
