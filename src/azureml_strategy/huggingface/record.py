"""What a checkpoint records of its transformers models, so that a folder for `from_pretrained` can be made of it.

It is one entry of Lightning's dictionary. It holds JSON texts and the bytes of the tokenizer's files: torch loads it
with `weights_only=True`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from azureml_strategy.checkpoint.formats import CheckpointFormatError
from azureml_strategy.checkpoint.serialization import HUGGING_FACE
from azureml_strategy.files import is_component
from azureml_strategy.huggingface.loading import source_of
from azureml_strategy.huggingface.transformers_internals import (
    commit_of,
    find_models,
    find_peft_models,
    is_tokenizer,
    library_class,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What tokenizers and processors of transformers write, and what older ones have written.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("processor_config.json", "preprocessor_config.json"),
)


@dataclass(frozen=True)
class AdapterRecord:
    """What `peft.get_peft_model` has put around a model.

    Attributes:
        prefix: name of the wrapper in the LightningModule.
        configs: the configuration of each adapter, by the adapter's name.
    """

    prefix: str
    configs: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class ModelRecord:
    """A transformers model of a LightningModule.

    Attributes:
        prefix: its name in the LightningModule.
        kind: its class in transformers.
        config: its configuration, as JSON.
        generation_config: its configuration for generating, as JSON; None if it does not generate.
        source: the folder or hub id that its weights or its configuration are from; empty if there is none.
        revision: the commit of the hub's repository; None for a folder.
    """

    prefix: str
    kind: str
    config: str
    generation_config: str | None
    source: str
    revision: str | None
    adapters: AdapterRecord | None

    @property
    def name(self) -> str:
        """The attribute of the LightningModule by which the user knows it: that of peft's wrapper, if there is one."""
        return self.adapters.prefix if self.adapters is not None else self.prefix


@dataclass(frozen=True)
class BaseRecord:
    """The frozen parameters that a checkpoint leaves out, because the base's files hold them.

    Attributes:
        checksums: of each parameter, by its name in the LightningModule.
        dtype: of the base in memory while the adapters were trained.
    """

    checksums: dict[str, int]
    dtype: str


@dataclass(frozen=True)
class CheckpointRecord:
    """All that a checkpoint records of its models.

    Attributes:
        base: what the checkpoint leaves out; None if it holds all weights.
        tokenizer: content of the tokenizer's files, as bytes in tensors, by name.
    """

    models: tuple[ModelRecord, ...]
    base: BaseRecord | None
    tokenizer: Mapping[str, Tensor]

    def entry(self) -> dict[str, Any]:
        """Return what to add to Lightning's dictionary."""
        base = None if self.base is None else asdict(self.base)
        text = json.dumps({"models": [asdict(each) for each in self.models], "base": base})
        return {HUGGING_FACE: {"record": text, "tokenizer": dict(self.tokenizer)}}

    @staticmethod
    def of(checkpoint: Mapping[str, Any]) -> CheckpointRecord | None:
        """Read the record of a loaded checkpoint; None if it has none.

        Raises:
            CheckpointFormatError: it is damaged, or names a file outside of the folder that is made of it.
        """
        entry = checkpoint.get(HUGGING_FACE)
        if entry is None:
            return None
        try:
            read = json.loads(entry["record"])
            base = None if read["base"] is None else BaseRecord(**read["base"])
            models = []
            for each in read["models"]:
                adapters = each.pop("adapters")
                models.append(ModelRecord(**each, adapters=None if adapters is None else AdapterRecord(**adapters)))
            record = CheckpointRecord(tuple(models), base, dict(entry["tokenizer"]))
            _require_harmless(record)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointFormatError(
                f"What the checkpoint tells of its transformers models is damaged: {error!r:.200}. Use another one, or "
                "save the model from your own code: model.save_pretrained(FOLDER) after load_from_checkpoint."
            ) from error
        return record


def _require_harmless(record: CheckpointRecord) -> None:
    """Refuse names that lead out of a folder, and values of types that a record does not have."""
    adapters = [name for each in record.models if each.adapters is not None for name in each.adapters.configs]
    for name in (*record.tokenizer, *adapters):
        if not isinstance(name, str) or not is_component(name):
            raise ValueError(f"{name!r:.100} is no name of a file")
    if any(not isinstance(each, Tensor) or each.dtype != torch.uint8 for each in record.tokenizer.values()):
        raise TypeError("a file of its tokenizer is no row of bytes")
    for each in record.models:
        if not all(isinstance(value, str) for value in (each.prefix, each.kind, each.config, each.source)):
            raise TypeError("a model's name or configuration is no text")


def record_models(module: nn.Module) -> tuple[ModelRecord, ...]:
    """Return the records of a LightningModule's models, as they are before a strategy cuts them."""
    wrappers = find_peft_models(module)
    return tuple(_record(name, model, wrappers) for name, model in find_models(module).items())


def _record(name: str, model: PreTrainedModel, wrappers: Mapping[str, Any]) -> ModelRecord:
    source = source_of(model)
    generation = model.generation_config.to_json_string() if model.can_generate() else None
    wrapper = next((outer for outer, each in wrappers.items() if each.get_base_model() is model), None)
    configs = {} if wrapper is None else {key: _plain(each) for key, each in wrappers[wrapper].peft_config.items()}
    return ModelRecord(
        prefix=name,
        kind=library_class(model),
        config=model.config.to_json_string(use_diff=False),
        generation_config=generation,
        source=(model.name_or_path or "") if source is None else source.name,
        revision=commit_of(model) if source is None else source.revision,
        adapters=None if wrapper is None else AdapterRecord(wrapper, configs),
    )


def model_of_source(source: str) -> ModelRecord:
    """Return the record of a model in a folder or on the hub, as if it were a LightningModule itself.

    Raises:
        CheckpointFormatError: there is no configuration, or it names no class.
    """
    from transformers import AutoConfig, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:  # transformers', for what is missing or unknown
        raise CheckpointFormatError(f"--model {source}: {str(error).splitlines()[0]}") from error
    if not config.architectures:
        raise CheckpointFormatError(f"--model {source}: its config.json names no class in `architectures`. Add it.")
    try:
        generation = GenerationConfig.from_pretrained(source).to_json_string()
    except OSError:  # transformers', for models that do not generate
        generation = None
    text = config.to_json_string(use_diff=False)
    return ModelRecord("", config.architectures[0], text, generation, source, None, None)


def _plain(config: Any) -> dict[str, Any]:
    """Return a configuration of peft as JSON holds it: sets as lists, enums as their values."""

    def converted(value: object) -> object:
        if isinstance(value, set):
            return sorted(value)
        if isinstance(value, Enum):
            return value.value
        raise TypeError(f"peft's configuration holds a {type(value).__name__}, which is no text or number")

    plain: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=converted))
    return plain


def places_of_files(module: nn.Module) -> list[tuple[str, str | None]]:
    """Return the folder or hub id of each model in a module, and its commit."""
    models = find_models(module).values()
    read = [(each, source_of(each)) for each in models]
    return [(each.name_or_path or "", commit_of(each)) if at is None else (str(at.folder), None) for each, at in read]


def tokenizer_files(holders: Iterable[object], places: Iterable[tuple[str, str | None]]) -> dict[str, Tensor]:
    """Return the bytes of the files of a training's tokenizer, by name.

    Args:
        holders: the LightningModule and its data module. Their first attribute that is a tokenizer is taken.
        places: see `places_of_files`. If no holder has a tokenizer, the first place with such files is taken.
    """
    for holder in holders:
        for value in vars(holder).values():
            if is_tokenizer(value):
                with TemporaryDirectory() as folder:
                    value.save_pretrained(folder)
                    return {each.name: _bytes(each) for each in sorted(Path(folder).iterdir()) if each.is_file()}
    return next(filter(None, (files_beside(source, revision) for source, revision in places)), {})


def files_beside(source: str, revision: str | None) -> dict[str, Tensor]:
    """Return the tokenizer's files in a model's folder, or in this machine's cache of the hub. It asks no network."""
    from huggingface_hub import try_to_load_from_cache

    if not source:
        return {}
    if Path(source).is_dir():
        paths = [Path(source) / name for name in _TOKENIZER_FILES]
    else:
        cached = [try_to_load_from_cache(source, name, revision=revision) for name in _TOKENIZER_FILES]
        paths = [Path(each) for each in cached if isinstance(each, str)]
    return {path.name: _bytes(path) for path in paths if path.is_file()}


def _bytes(file: Path) -> Tensor:
    return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
