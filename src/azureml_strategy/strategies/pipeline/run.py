"""Sends batches through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from azureml_strategy.strategies.pipeline.chain import Chain
from azureml_strategy.strategies.pipeline.engine import StageEngine, pipeline_bubble
from azureml_strategy.strategies.pipeline.logs import LastStage, SharedLogs
from azureml_strategy.strategies.pipeline.micro_batches import (
    MicroBatch,
    batch_size,
    check_divides,
    cut,
    fingerprint,
    shapes,
)
from azureml_strategy.strategies.pipeline.partition import PipelineError


class PipelineRun:
    """Runs each batch through the stages of a replica; all its ranks do so together.

    Args:
        engine: this rank's stage.
        module: its steps run on the last stage.
        chain: of the module.
        micro_batches: number of pieces of a training batch.
    """

    def __init__(self, engine: StageEngine, module: LightningModule, chain: Chain, micro_batches: int) -> None:
        grid = engine.grid
        self._engine, self._module, self._micro_batches = engine, module, micro_batches
        self._chain = chain
        self._stages: int = engine.num_stages
        self._last_rank: int = grid.stage_to_global(self._stages - 1)
        self._pipe_group = grid.get_pipe_parallel_group()
        self._logs = SharedLogs(module, self._last_rank, self._pipe_group, grid.get_data_parallel_group())
        self._shapes: tuple[Any, ...] | None = None
        self._compared: set[str] = set()
        engine.module.loss_fn = LastStage(module, chain, self._logs, self._stages == 1)

    def train(self, batch: Any, arguments: tuple[Any, ...], measure: bool) -> Tensor:
        """Run the forward and backward passes of a batch, and reduce the gradients.

        Args:
            batch: batch of this replica.
            arguments: arguments of `training_step` besides the batch.
            measure: whether to log the times of the stages and the bubble.

        Returns:
            The mean loss of the replica's micro-batches, on every stage.

        Raises:
            PipelineError: the batch cannot be cut, or the stages read different ones.
        """
        samples = batch_size(batch)
        check_divides(samples, self._micro_batches, "A training batch has")
        pieces = self._cut("training_step", batch, samples // self._micro_batches, arguments)
        self._prepare_buffers(pieces)
        profiler: Any = self._module.trainer.profiler  # type: ignore[attr-defined]
        self._engine.profile = profiler.profile
        with profiler.profile("pipeline_schedule"), self._engine.clock.step() if measure else nullcontext():
            self._engine.train_batch(_for_deepspeed(pieces))
        self._logs.repeat(("training_step",))
        if measure:
            self._log_times()
        loss: Tensor = self._engine.dp_group_loss
        return loss

    def evaluate(self, hook: str, batch: Any, arguments: tuple[Any, ...]) -> None:
        """Run the forward passes of a batch of any size. The last micro-batch may be smaller.

        Args:
            hook: `validation_step` or `test_step`.
            batch: batch of this replica.
            arguments: arguments of the hook besides the batch.
        """
        size = -(-batch_size(batch) // self._micro_batches)
        pieces = self._cut(hook, batch, size, arguments)
        whole = [piece for piece in pieces if piece.samples == size]
        for equal in (whole, pieces[len(whole) :]):
            if equal:
                self._prepare_buffers(equal)
                self._engine.evaluate(_for_deepspeed(equal), len(equal))
        self._logs.repeat((hook, *arguments[1:]))  # arguments hold the index of the batch, then that of the loader

    def _cut(self, hook: str, batch: Any, size: int, arguments: tuple[Any, ...]) -> list[MicroBatch]:
        if hook not in self._compared:
            self._compare_targets(hook, batch)
        pieces = []
        for piece, samples in cut(batch, size):
            inputs, _ = self._chain.split(piece)
            pieces.append(MicroBatch(piece, inputs, samples, hook, arguments))
        return pieces

    def _prepare_buffers(self, pieces: Sequence[MicroBatch]) -> None:
        """Make DeepSpeed send shapes anew if they change. All ranks of a replica see it in their own batch."""
        if self._shapes != shapes(pieces):
            self._shapes = shapes(pieces)
            self._engine.reset_activation_shape()

    def _compare_targets(self, hook: str, batch: Any) -> None:
        """Check that this stage and the last read the same targets: otherwise training goes on and learns nothing."""
        self._compared.add(hook)
        mine = fingerprint(self._chain.split(batch)[1])
        last = [mine]
        dist.broadcast_object_list(last, src=self._last_rank, group=self._pipe_group)
        if last[0] != mine:
            raise PipelineError(
                f"Global rank {dist.get_rank()} and rank {self._last_rank}, two stages of one replica, read different "
                "targets in their first batch. Use a DistributedSampler with trainer.distributed_sampler_kwargs, and "
                "let no random number of a data loader's worker decide about the targets."
            )

    def _log_times(self) -> None:
        device = self._engine.device
        times = torch.empty(self._stages, 2, device=device)
        mine = torch.tensor(self._engine.clock.read(), device=device)
        dist.all_gather(list(times.unbind()), mine, group=self._pipe_group)
        figures = {f"pipeline/stage_{stage}_work_s": seconds for stage, seconds in enumerate(times[:, 0])}
        # The first stage begins first and ends last, so its schedule takes as long as the pipeline's.
        figures["pipeline/bubble"] = 1.0 - times[:, 0].mean() / times[0, 1]
        figures["pipeline/bubble_formula"] = torch.tensor(pipeline_bubble(self._stages, self._micro_batches))
        self._module.log_dict(figures, on_step=True, on_epoch=False)


def _for_deepspeed(pieces: Sequence[MicroBatch]) -> Iterator[tuple[Any, MicroBatch]]:
    """Yield DeepSpeed's pairs: inputs for the first stage, and what the last one gets from it unchanged."""
    return ((piece.inputs, piece) for piece in pieces)
