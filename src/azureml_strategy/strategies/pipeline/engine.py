"""DeepSpeed's pipeline engine as Lightning's loops use it, the run of a batch through its stages, and a clock for the
pipeline bubble.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from azureml_strategy.strategies.pipeline.chain import Chain
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
from azureml_strategy.strategies.pipeline.stage import StageModule


def pipeline_bubble(num_stages: int, micro_batches: int) -> float:
    """Return the share of a step, 0 to 1, that equal stages wait under 1F1B.

    A stage works on m micro-batches in a step that takes the time of m + p - 1. Narayanan et al. 2021, section 2.2
    (https://arxiv.org/abs/2104.04473), give (p - 1) / m: the same waiting time divided by the time of work.

    Args:
        num_stages: p.
        micro_batches: m.
    """
    return (num_stages - 1) / (micro_batches + num_stages - 1)


class StageClock:
    """Measures the time of a step's schedule on the stage's device, and the part of it in forward and backward passes.

    The schedule ends with the last backward pass: the gradient reduction after it is not part of the bubble.

    On a GPU, the clock records events in the stream. Nothing waits for them until they are read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        self._running = False
        self._moments: list[Any] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure what happens in this context. Outside of it, the clock records nothing."""
        self._moments, self._running = [self._now()], True
        yield
        self._running = False

    @contextmanager
    def working(self) -> Iterator[None]:
        """Time a forward or a backward pass."""
        if not self._running:
            yield
            return
        self._moments.append(self._now())
        yield
        self._moments.append(self._now())

    def read(self) -> tuple[float, float]:
        """Return the seconds of work and of the whole schedule in the last measured step; waits for the GPU."""
        first, *passes = self._moments
        if self._on_gpu:
            passes[-1].synchronize()
        work = sum(self._seconds(start, end) for start, end in zip(passes[::2], passes[1::2], strict=True))
        return work, self._seconds(first, passes[-1])

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3 if self._on_gpu else end - start


def _profiled(span: str, execute: Callable[..., None], timed: bool = False) -> Callable[..., None]:
    """Return the method that carries out an instruction inside a span of the profiler, and on the clock if `timed`."""

    def run(engine: StageEngine, **arguments: Any) -> None:
        with engine.profile(span), engine.clock.working() if timed else nullcontext():
            execute(engine, **arguments)

    return run


class StageEngine(PipelineEngine):  # type: ignore[misc] # DeepSpeed has no annotations
    """One stage. `train_batch` ends with reduced gradients, and `step` applies them.

    The strategy constructs the engine itself, because `deepspeed.initialize` knows only DeepSpeed's own class. The
    base class gets the same arguments as from `deepspeed.initialize`.

    Args:
        stage: the layers of this rank.
        optimizer: of the stage's parameters; None for evaluation.
        lr_scheduler: becomes the engine's; Lightning steps it.
        config: DeepSpeed's configuration.
        clock: measures forward and backward passes.

    Attributes:
        set_mode: puts the LightningModule into training mode or out of it.
        profile: makes the span of a named part of the schedule, as the Trainer's profiler does.
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
        self.set_mode: Callable[[bool], object] = lambda mode: None
        self.profile: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext()
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
    def train(self, mode: bool = True) -> None:
        """Set the LightningModule's mode, as Lightning asks the engine for it. The stage leaves its layers alone."""
        self.set_mode(mode)

    @override
    def eval(self) -> None:
        """Put the LightningModule out of training mode, as Lightning asks the engine for it before an evaluation."""
        self.set_mode(False)

    @override
    def step(self, *args: Any, **kwargs: Any) -> None:
        """Take the optimizer step that ends a batch: clip and apply the gradients, then zero them."""
        self._exec_optimizer_step()

    def evaluate(self, micro_batches: Iterator[Any], number: int) -> None:
        """Run the forward passes of a number of micro-batches of one shape, given as to `train_batch`.

        DeepSpeed's `eval_batch` waits for all ranks in each call. It would wait for ever if the batches of two replicas
        differ in size, because one replica may need one more call.
        """
        self.module.eval()
        self._compute_loss = True
        self.set_dataiterator(micro_batches)
        dist.barrier(group=self.grid.get_pipe_parallel_group())  # the stages' sends of two calls must not mix
        with torch.no_grad():
            self._exec_schedule(schedule.InferenceSchedule(number, self.num_stages, self.stage_id))

    def _hold_optimizer_step(self) -> None:
        """Do nothing yet: Lightning calls `on_before_optimizer_step` first, then `step`."""

    # DeepSpeed's map from the instructions of a schedule to the methods that carry them out.
    _INSTRUCTION_MAP = {  # noqa: RUF012 - as DeepSpeed declares it
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.ForwardPass: _profiled("pipeline_forward", PipelineEngine._exec_forward_pass, timed=True),
        schedule.BackwardPass: _profiled("pipeline_backward", PipelineEngine._exec_backward_pass, timed=True),
        schedule.ReduceGrads: _profiled("pipeline_reduce", PipelineEngine._exec_reduce_grads),
        schedule.ReduceTiedGrads: _profiled("pipeline_reduce", PipelineEngine._exec_reduce_tied_grads),
        schedule.OptimizerStep: _hold_optimizer_step,
    }


class PipelineRun:
    """Runs each batch through the stages of a replica. It cuts a training batch into `micro_batches` pieces.

    All ranks of the replica do so together. The module's steps run on the last stage.
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
        """Run the forward and backward passes of a batch of this replica, and reduce the gradients.

        Args:
            batch: see `batch_size`.
            arguments: of `training_step` besides the batch.
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
        """Run the forward passes of a batch of any size for `validation_step` or `test_step`.

        The last micro-batch may be smaller.
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
        """Make DeepSpeed send shapes anew if they change. All ranks of a replica see the change in their own batch."""
        if self._shapes != shapes(pieces):
            self._shapes = shapes(pieces)
            self._engine.reset_activation_shape()

    def _compare_targets(self, hook: str, batch: Any) -> None:
        """Check that this stage and the last one read the same targets. Otherwise the model would learn nothing."""
        self._compared.add(hook)
        targets = fingerprint(self._chain.split(batch)[1])
        last = [targets]
        dist.broadcast_object_list(last, src=self._last_rank, group=self._pipe_group)
        if last[0] != targets:
            raise PipelineError(
                f"Global rank {dist.get_rank()} and rank {self._last_rank}, two stages of one replica, read different "
                "targets in their first batch. Use a DistributedSampler with trainer.distributed_sampler_kwargs, and "
                "let no random number of a data loader's worker decide about the targets."
            )

    def _log_times(self) -> None:
        device = self._engine.device
        times = torch.empty(self._stages, 2, device=device)
        of_stage = torch.tensor(self._engine.clock.read(), device=device)
        dist.all_gather(list(times.unbind()), of_stage, group=self._pipe_group)
        figures = {f"pipeline/stage_{stage}_work_s": seconds for stage, seconds in enumerate(times[:, 0])}
        # The first stage begins first and ends last, so its schedule takes as long as the pipeline's.
        figures["pipeline/bubble"] = 1.0 - times[:, 0].mean() / times[0, 1]
        figures["pipeline/bubble_formula"] = torch.tensor(pipeline_bubble(self._stages, self._micro_batches))
        self._module.log_dict(figures, on_step=True, on_epoch=False)


def _for_deepspeed(pieces: Sequence[MicroBatch]) -> Iterator[tuple[Any, MicroBatch]]:
    """Yield DeepSpeed's pairs: inputs for the first stage, and what the last one gets from it unchanged."""
    return ((piece.inputs, piece) for piece in pieces)
