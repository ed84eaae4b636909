"""Makes stock models of transformers and peft from a checkpoint's record, and gives them the checkpoint's weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from azureml_strategy.checkpoint.formats import CheckpointFormatError
from azureml_strategy.huggingface.adapters import digest, is_original, keeps_base, own_checksums
from azureml_strategy.huggingface.record import AdapterRecord, BaseRecord, ModelRecord
from azureml_strategy.huggingface.transformers_internals import KEYS_OF_CODE, find_models, tied_weights, whole_models

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

# How many names a message lists.
_SHOWN = 3


def skeleton(record: ModelRecord) -> PreTrainedModel:
    """Make the model without weights."""
    kind = _class(record)
    config = kind.config_class.from_dict(_without_code(json.loads(record.config)))
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


def _class(record: ModelRecord) -> Any:
    import transformers

    kind = getattr(transformers, record.kind, None) if record.kind.isidentifier() else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise CheckpointFormatError(
            f"The model is a {record.kind}, a class that transformers does not have. Save it from your own code: "
            "model.save_pretrained(FOLDER) after load_from_checkpoint."
        )
    return kind


def whole(record: ModelRecord, weights: Mapping[str, Tensor], checkpoint: Path) -> tuple[PreTrainedModel, set[str]]:
    """Make a model with its weights.

    Args:
        record: the model's.
        weights: of the checkpoint, by their names in the LightningModule.
        checkpoint: for messages.

    Returns:
        The model, and the names of its weights in the checkpoint.

    Raises:
        CheckpointFormatError: weights are missing or unknown, or tied ones differ.
    """
    model = skeleton(record)
    tied, own = tied_weights(model), _below(record.prefix, weights)
    for name, other in tied.items():
        if name in own and other in own and not torch.equal(own[name], own[other]):
            raise CheckpointFormatError(
                f"{checkpoint} has different values in {name} and {other}, which the configuration ties. Set "
                "tie_word_embeddings=False in the configuration that you train, if they are to differ."
            )
    return model, _assign(model, record.prefix, weights, set(tied), checkpoint)


def adapted(
    record: ModelRecord,
    adapters: AdapterRecord,
    base: BaseRecord | None,
    weights: Mapping[str, Tensor],
    checkpoint: Path,
    merge: bool,
    source: str | None,
) -> tuple[nn.Module, set[str]]:
    """Make a model with adapters and their weights.

    Args:
        record: the model's.
        adapters: what is around it.
        base: what the checkpoint leaves out.
        weights: of the checkpoint, by their names in the LightningModule.
        checkpoint: for messages.
        merge: add the adapters to the base's weights.
        source: folder or hub id of the base, instead of the recorded one.

    Returns:
        The model, and the names of its weights in the checkpoint. Without `merge`, a base that was left out has no
        values.

    Raises:
        CheckpointFormatError: weights are missing, or the base is not the one that the adapters were trained on.
    """
    left_out = _below(adapters.prefix, base.checksums if base is not None else {})
    if not merge and not left_out:
        raise CheckpointFormatError(
            f"{checkpoint} holds the base beside its adapters, as no file has the same one: an adapter folder would "
            "name a base that does not fit. Write both as one model: --merge"
        )
    if merge and left_out:
        assert base is not None
        model = _load_base(record, base, source or record.source)
    else:
        model = skeleton(record)
    wrapped = _wrapped(model, adapters)
    if merge and left_out:
        _require_same(wrapped, left_out, source or record.source, checkpoint)
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
    kind = _class(record)
    config = kind.config_class.from_dict(_without_code(json.loads(record.config)))
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
    """Give a model its weights, without a copy. Returns their names in the checkpoint."""
    own = _below(prefix, weights)
    missing, unexpected = model.load_state_dict(own, strict=False, assign=True)
    missing = [name for name in missing if name not in may_miss and not is_original(name)]
    if missing or unexpected:
        odd = [*(f"no {name}" for name in missing), *(f"an unknown {name}" for name in unexpected)]
        raise CheckpointFormatError(
            f"{checkpoint} does not hold a {type(model).__name__} under the name {prefix or '(the module itself)'}: "
            f"there is {', '.join(odd[:_SHOWN])} ({len(missing)} missing, {len(unexpected)} unknown). Give --model the "
            "folder of the model that was trained."
        )
    for each in find_models(model).values():
        each.tie_weights()
    return {f"{prefix}.{name}" if prefix else name for name in own}


def _below(prefix: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is in a module, by its names there."""
    start = f"{prefix}." if prefix else ""
    return {name.removeprefix(start): value for name, value in named.items() if name.startswith(start)}
