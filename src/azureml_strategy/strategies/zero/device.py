"""Lightning's DeepSpeed strategy on any device: CUDA as Lightning has it, and the CPU with gloo."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy
from typing_extensions import override


class AnyDeviceDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning's strategy without its refusal of CPUs, which DeepSpeed itself has supported since 0.9."""

    @property
    @override
    def root_device(self) -> torch.device:
        # DeepSpeed compares the device's index with 0, and a plain `cpu` has none.
        device = super().root_device
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device

    @override
    def setup_environment(self) -> None:
        assert self.parallel_devices is not None
        require_numbered_devices(self.parallel_devices)
        use_device(self.root_device.type)
        if self.root_device.type == "cpu":
            super(DeepSpeedStrategy, self).setup_environment()  # past Lightning's test for CUDA
        else:
            super().setup_environment()

    @override
    def _set_node_environment_variables(self) -> None:
        super()._set_node_environment_variables()
        # Where mpirun started one process on a node and we the others, they inherited its local rank, and DeepSpeed
        # would stop at the contradiction.
        if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:
            os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = str(self.local_rank)

    @override
    def setup_distributed(self) -> None:
        forget_groups()
        if self.root_device.type != "cpu":
            super().setup_distributed()
            return
        # Lightning's own, without its test that device i belongs to local rank i: CPU devices have no index.
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


def require_numbered_devices(devices: Sequence[torch.device]) -> None:
    """Stop where the processes of a node see a GPU each, all of them number 0.

    Args:
        devices: of the processes of a node.

    Raises:
        RuntimeError: they are not numbered by local rank, by which DeepSpeed takes them.
    """
    numbers = [device.index for device in devices if device.type == "cuda"]
    if len(set(numbers)) < len(numbers):
        raise RuntimeError(
            f"Each of {len(numbers)} processes of a node sees one GPU only (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}), but DeepSpeed takes the GPU with the number of the local "
            "rank. Let every process see all GPUs of its node: remove what sets CUDA_VISIBLE_DEVICES; or use "
            "azureml_ddp or azureml_model_parallel, which take the one they see."
        )


def forget_groups() -> None:
    """Let DeepSpeed make its process groups anew.

    It keeps those of the last Trainer of this process, although they may be destroyed, or cut for tensor parallelism.
    """
    from deepspeed.utils import groups

    groups._release_process_group_references()


def use_device(kind: str) -> None:
    """Let DeepSpeed work on the Trainer's kind of device.

    DeepSpeed chooses when it is first asked, before there is a Trainer: a GPU wherever it sees one.

    Args:
        kind: `cuda` or `cpu`.

    Raises:
        RuntimeError: DeepSpeed was told to use the CPU, and the Trainer uses GPUs.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if kind == "cpu":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        if get_accelerator().device_name() != "cpu":
            set_accelerator(CPU_Accelerator())
        # DeepSpeed would compile this for two minutes, a shared-memory all-reduce that only inference and tensor
        # parallelism call, and that gloo's replaces. To ask what else can be compiled starts compilers, too.
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    elif get_accelerator().device_name() == "cpu":
        raise RuntimeError(
            f"The Trainer uses {kind}, but DeepSpeed the CPU, as the variable DS_ACCELERATOR=cpu makes it. Unset it, "
            "or write Trainer(accelerator='cpu')."
        )
