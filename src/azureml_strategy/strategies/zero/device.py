"""Lightning's DeepSpeed strategy on any device: on CUDA as in Lightning, and on the CPU with gloo."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy
from typing_extensions import override

from azureml_strategy.lightning_internals import default_process_group_backend
from azureml_strategy.strategies.deepspeed_internals import compile_no_operations, forget_groups, let_go, reuse_groups


class AnyDevice:
    """Mix-in before Lightning's DeepSpeedStrategy, the Trainer's or Fabric's, that makes it accept CPUs.

    DeepSpeed itself has supported them since 0.9.
    """

    # The class of Lightning whose `setup_environment` refuses every device but CUDA's.
    requires_cuda: ClassVar[type]
    local_rank: int
    _process_group_backend: str | None
    _timeout: timedelta | None
    _parallel_devices: list[torch.device] | None

    @property
    def root_device(self) -> torch.device:
        """The device of this process. A CPU has a number, too, as DeepSpeed compares it with 0."""
        device: torch.device = super().root_device  # type: ignore[misc]
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device

    def setup_environment(self) -> None:
        """Start the process group, by DeepSpeed."""
        assert self._parallel_devices is not None
        numbers = [device.index for device in self._parallel_devices if device.type == "cuda"]
        if len(set(numbers)) < len(numbers):
            raise RuntimeError(
                f"Each of {len(numbers)} processes of a node sees one GPU only (CUDA_VISIBLE_DEVICES="
                f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}), but DeepSpeed takes the GPU with the number of the "
                "local rank. Let every process see all GPUs of its node: remove what sets CUDA_VISIBLE_DEVICES; or use "
                "azureml_ddp or azureml_model_parallel, which take the one they see."
            )
        use_device(self.root_device.type)
        forget_groups()
        if self.root_device.type == "cpu":
            # Lightning compares their numbers with the local ranks, but a plain `cpu` has none.
            self._parallel_devices = [torch.device("cpu", index) for index in range(len(self._parallel_devices))]
            super(self.requires_cuda, self).setup_environment()  # type: ignore[arg-type]
        else:
            super().setup_environment()  # type: ignore[misc]

    def _init_deepspeed_distributed(self) -> None:
        """Start the process group on this process's device, and have DeepSpeed use it.

        DeepSpeed itself gives a group of one process no device, so that torch warns at each barrier.
        """
        if self.root_device.type == "cuda" and not dist.is_initialized():
            self._set_node_environment_variables()
            backend = self._process_group_backend or default_process_group_backend(self.root_device)
            dist.init_process_group(backend, timeout=self._timeout, device_id=self.root_device)
        super()._init_deepspeed_distributed()  # type: ignore[misc]
        reuse_groups()

    def _set_node_environment_variables(self) -> None:
        super()._set_node_environment_variables()  # type: ignore[misc]
        # Where mpirun started one process of a node and we started the others, these have inherited its local rank.
        # DeepSpeed would stop at the contradiction.
        if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:
            os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = str(self.local_rank)


class AnyDeviceDeepSpeedStrategy(AnyDevice, DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy for the Trainer, on any device; its engine does not outlive it."""

    requires_cuda = DeepSpeedStrategy

    @override
    def teardown(self) -> None:
        from deepspeed import DeepSpeedEngine

        super().teardown()
        if isinstance(self.model, DeepSpeedEngine):  # an error may have come before there was one
            let_go(self.model)


def use_device(kind: str) -> None:
    """Make DeepSpeed work on the Trainer's kind of device, `cuda` or `cpu`.

    DeepSpeed chooses its device at the first request, before a Trainer exists. It takes a GPU if it sees one.

    Raises:
        RuntimeError: DeepSpeed was told to use the CPU, but the Trainer uses GPUs.
    """
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if kind == "cpu":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        if get_accelerator().device_name() != "cpu":
            set_accelerator(CPU_Accelerator())
        compile_no_operations()
    elif get_accelerator().device_name() == "cpu":
        raise RuntimeError(
            f"The Trainer uses {kind}, but DeepSpeed the CPU, as the variable DS_ACCELERATOR=cpu makes it. Unset it, "
            "or write Trainer(accelerator='cpu')."
        )
