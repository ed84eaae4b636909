"""The arguments of our strategy, as Lightning's takes them."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.types import _PATH

from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.zero.local_disk import find_local_disk

_STAGES = (0, 1, 2, 3)
# What a DeepSpeed configuration has no place for. Lightning ignores all other arguments beside one, without a word.
_BESIDE_CONFIG = {
    *("accelerator", "parallel_devices", "precision_plugin", "process_group_backend", "timeout"),
    *("logging_level", "remote_device", "load_full_weights", "exclude_frozen_parameters"),
    *("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
}


def strategy_arguments(
    stage: int | None, config: _PATH | dict[str, Any] | None, offload_nvme: _PATH | None, others: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of `lightning.pytorch.strategies.DeepSpeedStrategy`.

    Raises:
        ConfigurationError: an unknown stage, an argument that `config` makes void, or NVMe without stage 3.
        FileNotFoundError: `offload_nvme="auto"` where there is no such disk.
    """
    if config is not None:
        given = {"stage": stage, "offload_nvme": offload_nvme, **others}
        void = [name for name, value in given.items() if value is not None and name not in _BESIDE_CONFIG]
        if void:
            raise ConfigurationError(
                f"Both config and {', '.join(void)} were given. Write {', '.join(void)} into the DeepSpeed "
                "configuration (https://www.deepspeed.ai/docs/config-json), or leave config out."
            )
        return {"config": config, **others}
    stage = 2 if stage is None else stage
    if stage not in _STAGES:
        raise ConfigurationError(
            f"stage={stage!r} is no stage of ZeRO. Choose 1 (optimizer states), 2 (gradients too) or 3."
        )
    return {"stage": stage, **others, **(_nvme(stage, offload_nvme) if offload_nvme is not None else {})}


def _nvme(stage: int, folder: _PATH) -> dict[str, Any]:
    if stage != 3:
        raise ConfigurationError(f"offload_nvme needs ZeRO stage 3, and this is stage {stage}. Write stage=3.")
    return {
        "offload_optimizer": True,
        "offload_parameters": True,
        "offload_optimizer_device": "nvme",
        "offload_params_device": "nvme",
        "remote_device": "nvme",
        "nvme_path": str(find_local_disk() if folder == "auto" else folder),
    }
