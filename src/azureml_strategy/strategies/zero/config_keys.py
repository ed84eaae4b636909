"""Finds misspelt keys of a DeepSpeed configuration. DeepSpeed reads the keys that it knows, and ignores the others."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

# Sections of https://www.deepspeed.ai/docs/config-json that are no constants of `deepspeed.runtime.constants`.
_SECTIONS = {
    *("zero_optimization", "activation_checkpointing", "flops_profiler", "comms_logger", "aio", "autotuning"),
    *("tensorboard", "wandb", "csv_monitor", "comet", "elasticity", "compression_training", "data_efficiency"),
    *("curriculum_learning", "sparse_attention", "sparse_gradients", "amp", "nebula", "hybrid_engine", "pipeline"),
    *("timers", "tensor_parallel", "compile", "progressive_layer_drop", "eigenvalue", "quantize_training"),
    *("expert_parallel", "weight_quantization"),
}
# Nearer than `fp16` and `bf16` are to each other.
_NEAR = 0.8


def warn_of_misspelt_keys(config: Mapping[str, Any]) -> None:
    """Name keys that DeepSpeed does not know and that look like one it does. Keys of other programs pass."""
    if _SECTIONS.issuperset(config):
        return
    from deepspeed.runtime import constants

    named = {value for name, value in vars(constants).items() if name.isupper() and isinstance(value, str)}
    known = _SECTIONS | {value for value in named if value.replace("_", "").isalnum()}
    near = {key: get_close_matches(key, known, n=1, cutoff=_NEAR) for key in config if key not in known}
    found = [f"{key!r} (did you mean {matches[0]!r}?)" for key, matches in near.items() if matches]
    if found:
        listed = ", ".join(found)
        rank_zero_warn(f"DeepSpeed does not know, and ignores, {len(found)} key(s) of its configuration: {listed}.")
