"""Builds DeepSpeed's configuration from the arguments or the user's own, and checks its keys and requirements.

DeepSpeed documents the configuration at https://www.deepspeed.ai/docs/config-json.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_warn

from azureml_strategy.lazy import install_line
from azureml_strategy.strategies.errors import ConfigurationError, NoDeepSpeedError

# Sections of the configuration that are no constants of `deepspeed.runtime.constants`.
_SECTIONS = {
    *("zero_optimization", "activation_checkpointing", "flops_profiler", "comms_logger", "aio", "autotuning"),
    *("tensorboard", "wandb", "csv_monitor", "comet", "elasticity", "compression_training", "data_efficiency"),
    *("curriculum_learning", "sparse_attention", "sparse_gradients", "amp", "nebula", "hybrid_engine", "pipeline"),
    *("timers", "tensor_parallel", "compile", "progressive_layer_drop", "eigenvalue", "quantize_training"),
    *("expert_parallel", "weight_quantization"),
}
# Keys this similar are taken for one another. `fp16` and `bf16` are less similar.
_NEAR = 0.8

# File systems of local disks. Network shares and blob mounts use others.
_LOCAL = ("ext4", "xfs", "btrfs")
# A single disk, or several in one software RAID, as on VM sizes with eight NVMe disks.
_DEVICES = ("/dev/nvme", "/dev/md")
_STAGES = (0, 1, 2, 3)
# Arguments that have no place in a DeepSpeed configuration. If a configuration is given, Lightning silently ignores all
# other arguments.
_BESIDE_CONFIG = {
    *("accelerator", "parallel_devices", "precision_plugin", "process_group_backend", "timeout"),
    *("logging_level", "remote_device", "load_full_weights", "exclude_frozen_parameters"),
    *("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
}
_AUTO = "auto"
_HALVES = {"bf16": "bf16-", "fp16": "16-"}


def warn_of_misspelt_keys(config: Mapping[str, Any]) -> None:
    """Warn of keys that DeepSpeed does not know and that look like one it does. Keys of other programs pass."""
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


def require_deepspeed() -> None:
    """Check that DeepSpeed is installed."""
    if find_spec("deepspeed") is None:
        raise NoDeepSpeedError(
            "This strategy needs DeepSpeed, which is not installed here. Type: "
            f"{install_line('deepspeed')}; or choose strategy='azureml_ddp', which needs nothing more."
        )


def require_compiler(config: Mapping[str, Any]) -> None:
    """Check that DeepSpeed can compile the extensions that it would compile at first use.

    ZeRO itself is Python. DeepSpeed compiles the optimizer that the configuration names, and the reader of NVMe disks.
    """
    compiled, optimizer = [], config.get("optimizer")
    if optimizer:
        compiled.append(f"the optimizer {optimizer.get('type')!r} of its configuration")
    if uses_nvme(config):
        compiled.append("the reader of NVMe disks")
    compiler = os.environ.get("CXX", "c++")
    missing = [program for program in (compiler, "ninja") if shutil.which(program) is None]
    if compiled and missing:
        raise RuntimeError(
            f"DeepSpeed compiles {' and '.join(compiled)} at first use, but the PATH has no {' and no '.join(missing)}."
            " Type: apt-get install g++ ninja-build; or leave that part out of the configuration."
        )


def uses_nvme(config: Mapping[str, Any]) -> bool:
    """Whether parameters or optimizer states go to an NVMe disk."""
    zero = config.get("zero_optimization") or {}
    # DeepSpeed reads None and False as no offload.
    return any((zero.get(part) or {}).get("device") == "nvme" for part in ("offload_param", "offload_optimizer"))


def find_local_disk(mounts: Path = Path("/proc/mounts")) -> Path:
    """Find the writable folder with the most free space that is mounted from an NVMe disk of this node."""
    table = mounts.read_text()
    folders = [Path(point) for point in nvme_mounts(table) if os.path.isdir(point) and os.access(point, os.W_OK)]
    if not folders:
        raise FileNotFoundError(
            "offload_nvme='auto', but no writable folder of this node is mounted from an NVMe disk. A container sees "
            "the disk only where it is mounted into it: give the job docker_args such as '-v /mnt/nvme:/mnt/nvme'. "
            "Or name a folder yourself: offload_nvme='/path'; or keep the states in memory: offload_optimizer=True."
        )
    return max(folders, key=lambda folder: shutil.disk_usage(folder).free)


def nvme_mounts(table: str) -> Iterator[str]:
    """Yield the mount points of NVMe disks in a mount table, without the root file system."""
    for line in table.splitlines():
        device, point, kind, *_ = line.split(" ")
        if device.startswith(_DEVICES) and kind in _LOCAL and point != "/":
            yield point.replace("\\040", " ")  # how the table writes a blank


def strategy_arguments(
    stage: int | None,
    config: str | Path | dict[str, Any] | None,
    offload_nvme: str | Path | None,
    others: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments for `lightning.pytorch.strategies.DeepSpeedStrategy`.

    Raises:
        ConfigurationError: an unknown stage, an argument that would be ignored beside `config`, or NVMe without
            stage 3.
        FileNotFoundError: `offload_nvme="auto"`, but there is no such disk.
    """
    if config is not None:
        given = {"stage": stage, "offload_nvme": offload_nvme}
        void = [name for name, value in given.items() if value is not None] + ignored_beside_config(others)
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
    if offload_nvme is None:
        return {"stage": stage, **others}
    if stage != 3:
        raise ConfigurationError(f"offload_nvme needs ZeRO stage 3, and this is stage {stage}. Write stage=3.")
    return {
        "stage": stage,
        **others,
        "offload_optimizer": True,
        "offload_parameters": True,
        "offload_optimizer_device": "nvme",
        "offload_params_device": "nvme",
        "remote_device": "nvme",
        "nvme_path": str(find_local_disk() if offload_nvme == "auto" else offload_nvme),
    }


def ignored_beside_config(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of those arguments that Lightning's DeepSpeedStrategy ignores if it is given a configuration.

    An argument with Lightning's default value does not count: LightningCLI passes all of them.
    """
    defaults = {name: each.default for name, each in signature(DeepSpeedStrategy).parameters.items()}
    given = [name for name, value in arguments.items() if value is not None and value != defaults.get(name)]
    return [name for name in given if name not in _BESIDE_CONFIG]


@dataclass(frozen=True)
class TrainerNumbers:
    """Numbers of a training step, from the Trainer and its data loader.

    Attributes:
        accumulate_grad_batches: batches per optimizer step.
        gradient_clip_val: norm to clip to, or None.
        precision: as in `Trainer(precision=...)`.
        batch_size: samples per batch of one process; None if the loader does not tell.
        data_parallel_size: processes that read different samples.
        logged_batch_size: replaces `batch_size` in DeepSpeed's log; None does not.
    """

    accumulate_grad_batches: int
    gradient_clip_val: float | None
    precision: str
    batch_size: int | None
    data_parallel_size: int
    logged_batch_size: int | None = None


def agree(config: Mapping[str, Any], trainer: TrainerNumbers) -> dict[str, Any]:
    """Return a copy of the configuration with the Trainer's numbers in place of "auto" or of missing values.

    A number that equals the Trainer's is accepted. So is any `gradient_clipping` if the Trainer does not clip.
    Lightning adds the Trainer's numbers for the keys that this function leaves out, such as
    `gradient_accumulation_steps`.

    Raises:
        ConfigurationError: a number contradicts the Trainer's, or "auto" stands for a value that only the script knows.
    """
    agreed = deepcopy(dict(config))
    _agree_on_numbers(agreed, trainer)
    _agree_on_precision(agreed, trainer.precision)
    for section in ("optimizer", "scheduler"):  # DeepSpeed has defaults only for its own numbers
        for key in _autos(agreed.get(section, {}), section):
            raise ConfigurationError(
                f"The DeepSpeed configuration says {key}='auto', but only your script knows it. Write the number, or "
                f"leave {section!r} out and return it from LightningModule.configure_optimizers."
            )
    warn_of_misspelt_keys(config)
    # Lightning's default: otherwise DeepSpeed refuses every optimizer but its own.
    agreed.setdefault("zero_allow_untested_optimizer", True)
    return agreed


def _agree_on_numbers(config: dict[str, Any], trainer: TrainerNumbers) -> None:
    accumulate, clip = trainer.accumulate_grad_batches, trainer.gradient_clip_val
    _take(config, "gradient_accumulation_steps", accumulate, f"Trainer(accumulate_grad_batches={accumulate})")
    batch, replicas = trainer.batch_size, trainer.data_parallel_size
    if batch is None:
        config.pop("train_batch_size", None)  # only DeepSpeed's own log reads it
    else:
        _take(config, "train_micro_batch_size_per_gpu", batch, f"a data loader with batch_size={batch}")
        whole = f"{batch} samples a batch x {accumulate} batches a step x {replicas} data-parallel process(es)"
        _take(config, "train_batch_size", batch * accumulate * replicas, whole)
    if trainer.logged_batch_size is not None:
        config["train_micro_batch_size_per_gpu"] = trainer.logged_batch_size
    elif config.get("train_micro_batch_size_per_gpu", _AUTO) == _AUTO:
        config["train_micro_batch_size_per_gpu"] = batch or 1
    if clip is not None or config.get("gradient_clipping") == _AUTO:
        _take(config, "gradient_clipping", clip, f"Trainer(gradient_clip_val={clip})")


def _take(config: dict[str, Any], key: str, value: float | None, source: str) -> None:
    """Drop a key that Lightning will set anyway, and refuse a value that contradicts it."""
    found = config.pop(key, _AUTO)
    if found not in (_AUTO, value):
        raise ConfigurationError(
            f"The DeepSpeed configuration says {key}={found!r}, but {value} comes from {source}. Leave {key} out of "
            "the configuration, write 'auto', or let the two agree."
        )


def _agree_on_precision(config: dict[str, Any], precision: str) -> None:
    for name, start in _HALVES.items():
        section = config.get(name)
        if section is None:
            continue
        wanted, enabled = precision.startswith(start), section.get("enabled", False)
        if enabled not in (_AUTO, wanted):
            remedy = f"precision='{start}mixed'" if enabled else "precision='32-true'"
            raise ConfigurationError(
                f"The DeepSpeed configuration says {name}.enabled={enabled}, but the Trainer has precision="
                f"{precision!r}. Write Trainer({remedy}), or {name}: {{enabled: 'auto'}} in the configuration."
            )
        section["enabled"] = wanted


def _autos(value: Any, key: str) -> Iterator[str]:
    if value == _AUTO:
        yield key
    elif isinstance(value, Mapping):
        for name, child in value.items():
            yield from _autos(child, f"{key}.{name}")


def add_up_precisely(config: dict[str, Any], batches: int) -> None:
    """Have gradients of accumulated batches added up in float32 under bf16 where it costs little; else say so.

    Under stage 3 a rank keeps its part of the sum. Stages 1 and 2 would keep a whole one in float32.

    Args:
        config: is changed.
        batches: number of batches in a step.
    """
    if batches == 1 or "data_types" in config:
        return
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    if stage == 3:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    elif stage in (1, 2):
        rank_zero_warn(
            f"DeepSpeed adds up the gradients of {batches} batches in bfloat16 under stage {stage}: small ones are "
            "lost beside large ones. Stage 3 adds up in float32 here; so does "
            f"AzureMLDeepSpeedStrategy(config={{'zero_optimization': {{'stage': {stage}}}, 'data_types': "
            "{'grad_accum_dtype': 'fp32'}}), for 4 bytes a parameter on each rank."
        )
