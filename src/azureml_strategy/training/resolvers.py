"""Resolvers that our YAML files use at run time, such as `${azureml.by_device:32,224}`.

The search-path plugin loads them too, so that a user's own Hydra application can use them.
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from azureml_strategy.cluster.job import read_job
from azureml_strategy.cluster.launchers import detect_ranks


def register_resolvers() -> None:
    """Register the resolvers with OmegaConf. Repeated calls do no harm."""
    OmegaConf.register_new_resolver("azureml.run", run_name, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("azureml.job_id", job_id, replace=True)
    OmegaConf.register_new_resolver("azureml.hydra_subdir", hydra_subdir, replace=True)
    OmegaConf.register_new_resolver("azureml.by_device", by_device, replace=True)
    OmegaConf.register_new_resolver("azureml.devices", devices, replace=True)
    OmegaConf.register_new_resolver("azureml.precision", precision, replace=True)


def run_name() -> str:
    """A name for the output folder that all ranks share: that of the job, otherwise the current time."""
    return os.environ.get("AZUREML_RUN_ID") or datetime.now().strftime("%Y-%m-%d/%H-%M-%S")


def job_id() -> str | None:
    """An id of this run that stays the same when its job is restarted; None outside of a job.

    It is the job's id, with the number of the run if the job does a sweep.
    """
    job = read_job()
    if job is None:
        return None
    sweeps = HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN
    return f"{job.run_id}-{HydraConfig.get().job.num}" if sweeps else job.run_id


def hydra_subdir() -> str | None:
    """The folder in which Hydra records the configuration; None on all global ranks but 0."""
    launch = detect_ranks()
    return ".hydra" if launch is None or launch.rank == 0 else None


def by_device(on_cpu: Any, on_gpu: Any) -> Any:
    """Choose one value for a machine without a GPU, and the other for a machine with one."""
    import torch

    return on_gpu if torch.cuda.is_available() else on_cpu


def devices(elsewhere: int) -> int | str:
    """What a distributed job has started, by `auto`; elsewhere this many processes, which the strategy starts."""
    return "auto" if read_job() is not None and detect_ranks() is not None else elsewhere


def precision() -> str:
    """The fastest of Lightning's precisions for this device: bf16-mixed if its hardware computes bfloat16.

    Otherwise it is 16-mixed on a GPU and 32-true on a CPU.
    """
    import torch

    if torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed"
    return "bf16-mixed" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "32-true"
