"""Settings of a recipe that change a run and that the planner does not count."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from azureml_strategy.planning.errors import PlanError

_UNLESS: dict[str, tuple[Any, ...]] = {
    # every value but these changes what is predicted
    "strategy.sequence_parallel_size": (None, 1),
    "strategy.data_parallel_size": (None, "auto"),
    "strategy.tensor_parallel_across_nodes": (None, False),
    "strategy.offload_optimizer": (None, False),
    "strategy.offload_parameters": (None, False),
    "strategy.offload_nvme": (None,),
    "strategy.config": (None,),
    "strategy.zero_stage": (None, 0),
    "strategy.partition": (None, "parameters"),
    "strategy.outer_learning_rate": (None,),
    "strategy.compression": (None,),
    "strategy.fragments": (None, 1),
    "strategy.delay": (None, 0),
    "strategy.mixing": (None,),
    "strategy.replica": (None, "auto"),
    "strategy.warmup_steps": (None, 0),
    "strategy.gradient_compression": (None, "bf16", "fp16"),
    "strategy.find_unused_parameters": (None, False),
    "trainer.max_time": (None,),
    "trainer.sync_batchnorm": (None, False),
    "trainer.detect_anomaly": (None, False),
    "trainer.profiler": (None,),
}


# They end a run, or cut it elsewhere by a little.
_HARMLESS = ("trainer.max_time=", "strategy.partition=")


def refuse_uncounted(settings: Iterable[str]) -> None:
    """Refuse settings that make a run another one than the plan.

    Args:
        settings: from `uncounted_settings`.

    Raises:
        PlanError: there is one.
    """
    refused = [each for each in settings if not each.startswith(_HARMLESS)]
    if refused:
        raise PlanError(f"The planner does not count {', '.join(refused)}.")


def uncounted_settings(config: DictConfig) -> tuple[str, ...]:
    """Return the settings, each as `KEY=VALUE`.

    Args:
        config: a recipe, resolved as a machine with GPUs does.
    """
    given = {key: config[key.partition(".")[0]].get(key.partition(".")[2]) for key in _UNLESS}
    found = [f"{key}={value}" for key, value in given.items() if value not in _UNLESS[key]]
    # A schedule of periods has a class; its mean length is not known here.
    return (*found, "strategy.period") if OmegaConf.is_config(config.strategy.get("period")) else tuple(found)
