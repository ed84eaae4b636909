"""Makes stock models of transformers and peft from a checkpoint of any strategy, and writes the folder that
`from_pretrained` opens.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from azureml_strategy.checkpoint.consolidate import checkpoint_format
from azureml_strategy.checkpoint.formats import CheckpointFormatError
from azureml_strategy.huggingface.adapters import digest, is_original, keeps_base, own_checksums
from azureml_strategy.huggingface.record import (
    AdapterRecord,
    BaseRecord,
    CheckpointRecord,
    ModelRecord,
    files_beside,
    model_of_source,
)
from azureml_strategy.huggingface.sources import SHOWN
from azureml_strategy.huggingface.transformers_internals import (
    KEYS_OF_CODE,
    buffers_in_float32,
    find_models,
    find_peft_models,
    parameters_in_float32,
    tied_weights,
    whole_models,
)

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

# Written as it was recorded: transformers refuses to write settings that contradict each other, as those of some models
# on the hub do, and reads them all the same.
_GENERATION = "generation_config.json"


def skeleton(record: ModelRecord) -> PreTrainedModel:
    """Make the model without weights."""
    kind, config = _class_and_config(record)
    config.name_or_path = record.source
    with torch.device("meta"):
        model: PreTrainedModel = kind(config)
    return model


def _without_code(config: Any) -> Any:
    """Return a configuration without the keys that name code to run: kernels of the hub, classes of a repository."""
    if isinstance(config, list):
        return [_without_code(each) for each in config]
    if not isinstance(config, dict):
        return config
    return {name: _without_code(each) for name, each in config.items() if name not in KEYS_OF_CODE}


def _class_and_config(record: ModelRecord) -> tuple[Any, Any]:
    import transformers

    kind = getattr(transformers, record.kind, None) if record.kind.isidentifier() else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise CheckpointFormatError(
            f"The model is a {record.kind}, a class that transformers does not have. Save it from your own code: "
            "model.save_pretrained(FOLDER) after load_from_checkpoint."
        )
    return kind, cast(Any, kind.config_class).from_dict(_without_code(json.loads(record.config)))


def _whole(record: ModelRecord, weights: Mapping[str, Tensor], checkpoint: Path) -> tuple[PreTrainedModel, set[str]]:
    """Return a model with its weights, and the names of these in the checkpoint."""
    model = skeleton(record)
    tied, own = tied_weights(model), _below(record.prefix, weights)
    for name, other in tied.items():
        if name in own and other in own and not torch.equal(own[name], own[other]):
            raise CheckpointFormatError(
                f"{checkpoint} has different values in {name} and {other}, which the configuration ties. Set "
                "tie_word_embeddings=False in the configuration that you train, if they are to differ."
            )
    return model, _assign(model, record.prefix, weights, set(tied), checkpoint)


def _adapted(
    record: ModelRecord,
    adapters: AdapterRecord,
    base: BaseRecord | None,
    weights: Mapping[str, Tensor],
    checkpoint: Path,
    options: ExportOptions,
) -> tuple[nn.Module, set[str]]:
    """Return a model with adapters and their weights, and the names of these in the checkpoint.

    The base that the checkpoint leaves out is read from its files to merge the adapters into it. Otherwise it has no
    values.
    """
    left_out = _below(adapters.prefix, base.checksums if base is not None else {})
    merge, source = options.merge, options.source or record.source
    if not merge and not left_out:
        raise CheckpointFormatError(
            f"{checkpoint} holds the base beside its adapters, as no file has the same one: an adapter folder would "
            "name a base that does not fit. Write both as one model: --merge"
        )
    reread = base if merge and left_out else None
    model = skeleton(record) if reread is None else _load_base(record, reread, source)
    wrapped = _wrapped(model, adapters)
    if reread is not None:
        _require_same(wrapped, left_out, source, checkpoint)
    inner = next(name for name, each in wrapped.named_modules() if each is model)
    may_miss = left_out.keys() | {f"{inner}.{name}" for name in tied_weights(model)}
    own = _assign(wrapped, adapters.prefix, weights, may_miss, checkpoint)
    if not merge:
        return wrapped, own
    if len(wrapped.peft_config) > 1:
        raise CheckpointFormatError(
            f"The model has {len(wrapped.peft_config)} adapters: {', '.join(wrapped.peft_config)}. Leave --merge out, "
            "and merge those that you want by peft's add_weighted_adapter."
        )
    return wrapped.merge_and_unload(), own


def _load_base(record: ModelRecord, base: BaseRecord, source: str) -> PreTrainedModel:
    kind, config = _class_and_config(record)
    revision = {"revision": record.revision} if record.revision and source == record.source else {}
    try:
        with whole_models():
            model: PreTrainedModel = kind.from_pretrained(
                source, config=config, dtype=getattr(torch, base.dtype), **revision
            )
    except OSError as error:  # transformers', for what is missing
        raise CheckpointFormatError(
            f"The base {source} cannot be read: {str(error).splitlines()[0]} Name it by --model FOLDER, or leave "
            "--merge out to write the adapters alone."
        ) from error
    return model


def _wrapped(model: PreTrainedModel, adapters: AdapterRecord) -> PeftModel:
    from peft import PeftConfig, get_peft_model

    configs = {
        name: PeftConfig.from_peft_type(**_without_code(each))  # type: ignore[no-untyped-call]
        for name, each in adapters.configs.items()
    }
    if not keeps_base(configs):
        for each in configs.values():
            each.init_lora_weights = True  # the values are in the checkpoint, and need no weights to start from
    (first, config), *others = configs.items()
    # As they were trained: peft would have 16-bit adapters in float32.
    wrapped: PeftModel = get_peft_model(model, config, first, autocast_adapter_dtype=False)
    for name, each in others:
        wrapped.add_adapter(name, each)
    return wrapped


def _require_same(wrapped: PeftModel, sums: Mapping[str, int], source: str, checkpoint: Path) -> None:
    parameters = dict(wrapped.named_parameters(remove_duplicate=False))
    found = own_checksums({name: parameters[name] for name in sums if name in parameters})
    different = [name for name, value in sums.items() if found.get(name) != value]
    if different:
        raise CheckpointFormatError(
            f"{checkpoint} has adapters of a base with checksum {digest(sums)}, but {source} has {digest(found)}: "
            f"{len(different)} of {len(sums)} parameters differ, such as {different[0]}. Name the base that they were "
            "trained on: --model FOLDER"
        )


def _assign(
    model: nn.Module, prefix: str, weights: Mapping[str, Tensor], may_miss: set[str], checkpoint: Path
) -> set[str]:
    """Give a model its weights, without a copy, and return their names in the checkpoint."""
    own = _below(prefix, weights)
    missing, unexpected = model.load_state_dict(own, strict=False, assign=True)
    missing = [name for name in missing if name not in may_miss and not is_original(name)]
    if missing or unexpected:
        odd = [*(f"no {name}" for name in missing), *(f"an unknown {name}" for name in unexpected)]
        raise CheckpointFormatError(
            f"{checkpoint} does not hold a {type(model).__name__} under the name {prefix or '(the module itself)'}: "
            f"there is {', '.join(odd[:SHOWN])} ({len(missing)} missing, {len(unexpected)} unknown). Give --model the "
            "folder of the model that was trained."
        )
    for each in find_models(model).values():
        each.tie_weights()
    return {f"{prefix}.{name}" if prefix else name for name in own}


def _below(prefix: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is in a module, by its names there."""
    start = f"{prefix}." if prefix else ""
    return {name.removeprefix(start): value for name, value in named.items() if name.startswith(start)}


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
        options: how to write it.

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
        model, own = _whole(chosen, weights, checkpoint)
    else:
        model, own = _adapted(chosen, chosen.adapters, record.base, weights, checkpoint, options)
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
    """Cast a model, except for what transformers keeps in float32 when it reads the folder."""
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
