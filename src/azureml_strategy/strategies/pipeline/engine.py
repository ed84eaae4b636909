"""DeepSpeed's pipeline engine with the optimizer step left to Lightning."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.optim import Optimizer
from typing_extensions import override

from azureml_strategy.strategies.pipeline.stage import StageModule
from azureml_strategy.strategies.pipeline.timing import StageClock


class StageEngine(PipelineEngine):  # type: ignore[misc] # DeepSpeed has no annotations
    """One stage. `train_batch` ends with reduced gradients, and `step` applies them.

    Made here and not by `deepspeed.initialize`, which knows only DeepSpeed's own class; the arguments are those it
    gives.

    Args:
        stage: the layers of this rank.
        optimizer: over its parameters; None for evaluation.
        lr_scheduler: handed back as the engine's; Lightning steps it.
        config: DeepSpeed's configuration.
        clock: takes the time of forward and backward passes, on the stage's device.
    """

    def __init__(
        self,
        stage: StageModule,
        optimizer: Optimizer | None,
        lr_scheduler: Any,
        config: dict[str, Any],
        clock: StageClock,
    ) -> None:
        self.clock = clock
        if config.get("bf16", {}).get("enabled"):
            _prepare_for_bfloat16(stage)
        super().__init__(
            args=Namespace(device_rank=clock.device.index),
            model=stage,
            optimizer=optimizer,
            model_parameters=[parameter for parameter in stage.parameters() if parameter.requires_grad],
            lr_scheduler=lr_scheduler,
            mpu=stage.mpu(),
            dist_init_required=False,
            config=config,
            config_class=DeepSpeedConfig(config, stage.mpu()),
        )

    @override
    def step(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer step that ends a batch: clipping, update, gradients back to zero."""
        self._exec_optimizer_step()

    def evaluate(self, micro_batches: Iterator[Any], number: int) -> None:
        """Forward passes of micro-batches of one shape.

        DeepSpeed's `eval_batch` waits for all ranks each time, and would wait for ever where batches of two replicas
        differ in size: one of them may need a call more.

        Args:
            micro_batches: what the stages read, as for `train_batch`.
            number: how many they are.
        """
        self.module.eval()
        self._compute_loss = True
        self.set_dataiterator(micro_batches)
        dist.barrier(group=self.grid.get_pipe_parallel_group())  # the stages' sends of two calls must not mix
        with torch.no_grad():
            self._exec_schedule(schedule.InferenceSchedule(number, self.num_stages, self.stage_id))

    def _hold_optimizer_step(self) -> None:
        """Nothing yet: Lightning calls `on_before_optimizer_step` first, then `step`."""

    def _timed_forward(self, buffer_id: int) -> None:
        with self.clock.working():
            self._exec_forward_pass(buffer_id)

    def _timed_backward(self, buffer_id: int) -> None:
        with self.clock.working():
            self._exec_backward_pass(buffer_id)

    # DeepSpeed's map from the instructions of a schedule to the methods that carry them out.
    _INSTRUCTION_MAP = {  # noqa: RUF012 - as DeepSpeed declares it
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.ForwardPass: _timed_forward,
        schedule.BackwardPass: _timed_backward,
        schedule.OptimizerStep: _hold_optimizer_step,
    }


def _prepare_for_bfloat16(stage: StageModule) -> None:
    """DeepSpeed converts parameters and no buffers: so a layer without parameters is converted here."""
    for layer in stage.layers.values():
        if not list(layer.parameters()):
            layer.to(torch.bfloat16)
