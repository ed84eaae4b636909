"""Adapters of peft: which parameters belong to the base and need not be written, and checksums to compare bases by.

A checkpoint of adapters holds no copy of the frozen base, but a checksum of each of its parameters. The checksums are
computed from the parameters in memory, not from files: the adapters were trained on what is in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from azureml_strategy.control.gather import gather
from azureml_strategy.huggingface.loading import source_of
from azureml_strategy.huggingface.transformers_internals import (
    find_models,
    find_peft_models,
    is_loaded,
    loaded_by_from_pretrained,
)

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

# Ways to initialise LoRA that leave the base as it is in the file. PiSSA, OLoRA, CorDA and LoftQ compute the adapters
# from the base's weights, and subtract them from these.
_INITIAL_VALUES = (True, False, None, "gaussian", "orthogonal", "eva")
_MODULUS = 1 << 64
# Numbers that are converted at a time: 64 MB in float32.
_CHUNK = 1 << 24


def base_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the frozen parameters that come from files, by their names in the module's state dict.

    Only those of a base that `peft.get_peft_model` has wrapped count. Frozen parameters elsewhere, and trained ones of
    the base, exist nowhere but in the checkpoint.
    """
    found: dict[str, nn.Parameter] = {}
    for prefix, wrapped in find_peft_models(module).items():
        models = find_models(wrapped).values()
        if not models or not all(map(_loaded, models)) or not keeps_base(wrapped.peft_config):
            continue
        # FSDP2 and DeepSpeed replace parameters; then none of them is marked as loaded.
        marked = any(map(is_loaded, wrapped.parameters()))
        start = f"{prefix}." if prefix else ""
        adapters = _adapter_parameters(wrapped)
        for name, parameter in wrapped.named_parameters(remove_duplicate=False):
            frozen = not parameter.requires_grad and id(parameter) not in adapters
            if frozen and (is_loaded(parameter) or not marked or is_original(name)):
                found[start + name] = parameter
    return found


def is_original(name: str) -> bool:
    """Whether a parameter belongs to a module that peft has replaced by a trained copy. Nothing uses its values."""
    return ".original_module." in name


def _loaded(model: PreTrainedModel) -> bool:
    return source_of(model) is not None or loaded_by_from_pretrained(model)


def keeps_base(configs: Mapping[str, Any]) -> bool:
    """Whether wrapping a base with adapters of these configurations leaves its weights as they were in the file."""
    return all(getattr(each, "init_lora_weights", True) in _INITIAL_VALUES for each in configs.values())


def _adapter_parameters(wrapped: PeftModel) -> set[int]:
    """Return the ids of all adapters' parameters: an adapter that is not active is frozen like the base."""
    from peft import get_peft_model_state_dict

    state = wrapped.state_dict(keep_vars=True)
    return {
        id(parameter)
        for name in wrapped.peft_config
        for parameter in get_peft_model_state_dict(wrapped, state, name, save_embedding_layers=False).values()
    }


def checksums(parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Compute a checksum below 2 ** 64 of each parameter, however it is spread over the ranks; a collective.

    It is the sum of the numbers' bits, read as float32. So each rank adds up what it holds, and the result is the same
    for any number of ranks. It detects other values, such as those of another revision or of further training, but not
    the same values in another order. Parameters may be whole, DTensors, or cut by DeepSpeed.
    """
    held = gather(list(own_checksums(parameters).values()))
    totals = [sum(parts) % _MODULUS for parts in zip(*held, strict=True)]
    return dict(zip(parameters, totals, strict=True))


def own_checksums(parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Compute this process's part of `checksums`: for whole parameters on rank 0, all of them."""
    return {name: _own_sum(each) % _MODULUS for name, each in parameters.items()}


def digest(sums: Mapping[str, int]) -> str:
    """Return a short name for the checksums of a base."""
    lines = "".join(f"{name} {value}\n" for name, value in sorted(sums.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:12]


def _own_sum(parameter: nn.Parameter) -> int:
    """Return this rank's part of the sum. If several ranks hold the same numbers, the first of them adds these."""
    if isinstance(parameter, DTensor):
        coordinates = parameter.device_mesh.get_coordinate() or ()
        first = all(i == 0 for i, place in zip(coordinates, parameter.placements, strict=True) if place.is_replicate())
        return _sum_of_bits(parameter.to_local()) if first else 0
    cut = getattr(parameter, "ds_tensor", None)
    if cut is not None:  # its last part is filled up with zeros, whose bits are zero
        return _sum_of_bits(cut)
    return _sum_of_bits(parameter) if not dist.is_initialized() or dist.get_rank() == 0 else 0


def _sum_of_bits(tensor: Tensor) -> int:
    chunks = torch.split(tensor.detach().reshape(-1), _CHUNK)
    return sum(int(each.float().view(torch.int32).sum(dtype=torch.int64)) for each in chunks)
