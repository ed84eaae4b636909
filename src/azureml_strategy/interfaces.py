"""Protocols between rooms: what one room asks of objects that another room, or a user, has made.

A room that checks for one need not import the room that implements it. Protocols of a single room stay in that room.
Beside them are the label and the layer that several rooms share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch import Tensor, nn

    from azureml_strategy.checkpoint.folder import FileChecksums
    from azureml_strategy.control.gather import Exchange

# The label of what has no loss. torch's cross_entropy and transformers ignore it by default.
IGNORED_LABEL = -100
# What `SharesCopies.copies` returns where all ranks hold the same.
ALL_RANKS = "all ranks"
# Of one logger: name, value, step and milliseconds since 1970 of each metric.
PendingMetrics = list[list[Any]]


@runtime_checkable
class ActsBetweenSteps(Protocol):
    """A callback that is called between two steps."""

    def on_step_boundary(self, trainer: Trainer) -> None:
        """Act after everything of the last step is done: hooks, validation, schedulers and logs; on all ranks alike.

        After the last batch of an epoch, it is called when the end of the epoch is done as well.
        `trainer.current_epoch` is still the epoch of the last step. It is not called between batches whose gradients
        are accumulated.
        """


@runtime_checkable
class Pausable(Protocol):
    """A callback that would mistake a pause for a fault, such as `HangWatch`."""

    def pause(self) -> None:
        """Training pauses from now on."""

    def resume(self) -> None:
        """Training continues."""


@contextmanager
def paused(trainer: Trainer) -> Iterator[None]:
    """Pause every `Pausable` callback inside the context, in which the Trainer's main thread waits."""
    pausable = [each for each in trainer.callbacks if isinstance(each, Pausable)]  # type: ignore[attr-defined]
    for each in pausable:
        each.pause()
    try:
        yield
    finally:
        for each in pausable:
            each.resume()


@runtime_checkable
class ExpectsCheckpoints(Protocol):
    """A callback that allows for a checkpoint taking longer to write than a step, such as `HangWatch`."""

    def writes_checkpoint(self) -> None:
        """Training waits for a checkpoint from now on."""


@runtime_checkable
class RunLogger(Protocol):
    """A logger that writes to a run later than it is called, such as `JobMLFlowLogger`."""

    def log_tags(self, tags: dict[str, str]) -> None:
        """Set tags of the run."""

    def flush(self, timeout_s: float = ...) -> bool:
        """Wait until everything is written, for some seconds; whether it is."""


@runtime_checkable
class KnowsEarlierAttempts(Protocol):
    """A logger whose run has what earlier attempts of the job have logged, such as `JobMLFlowLogger`."""

    def metric_at_start(self, name: str) -> float | None:
        """A metric's last value when the run was opened; on rank 0."""

    def tag_at_start(self, name: str) -> str | None:
        """A tag's value when the run was opened; on rank 0."""


@runtime_checkable
class KeepsFiles(Protocol):
    """A logger that keeps files with its run, such as `JobMLFlowLogger`."""

    def run_and_store(self) -> tuple[str | None, str]:
        """The run's id, None while it is not known, and the address of its store, without secrets."""

    def log_file(self, file: Path, folder: str) -> None:
        """Keep a file of rank 0, in the background."""

    def send_file(self, run_id: str, file: Path, folder: str) -> None:
        """Keep a file of any rank, now."""


@runtime_checkable
class KeepsPendingMetrics(Protocol):
    """A logger that keeps metrics in memory until they are written, such as `JobMLFlowLogger`."""

    def pending_metrics(self) -> PendingMetrics:
        """The metrics that are not written yet; a resumed run would not log them again."""

    def log_pending(self, metrics: PendingMetrics) -> None:
        """Log what `pending_metrics` returned in a previous attempt, except what the store already has."""


@runtime_checkable
class ContinuesRun(Protocol):
    """A logger that can skip what a previous attempt has logged, such as `JobMLFlowLogger`."""

    def continue_run(self) -> None:
        """Training resumes from a checkpoint, and may repeat steps that were logged already."""


class WriteStaged(Protocol):
    """Writes staged content or a copy of it. All ranks call it, on any thread."""

    def __call__(self, content: Any, path: Path, exchange: Exchange) -> FileChecksums | None:
        """Write this rank's files below a path, in steps that all ranks take together, so that all of them fail alike.

        Args:
            content: the content as it was staged.
            path: path of the checkpoint.
            exchange: connects the ranks that write.

        Returns:
            The files that are already on disk and summed, by name, on all ranks; None if all files must be read back.

        Raises:
            StepError: a step failed on some rank.
        """


@runtime_checkable
class StagesCheckpoint(Protocol):
    """A strategy that can stage a checkpoint now and write it later."""

    def stage_checkpoint(self, checkpoint: dict[str, Any]) -> tuple[Any, WriteStaged] | None:
        """Collect what this rank writes of a checkpoint, as Lightning gives it to `save_checkpoint`; a collective.

        Return the content to copy, and a function that writes the copy; None if it must be written at once.
        """


@runtime_checkable
class ExportsModels(Protocol):
    """A strategy whose checkpoints describe the transformers models in them."""

    def has_models(self) -> bool:
        """Whether the module holds such a model, once the strategy is set up."""

    def export_hugging_face(self, checkpoint: Path, output: Path) -> None:
        """Write a folder for `from_pretrained` from a complete checkpoint of this strategy. One process calls it.

        The folder appears complete or not at all. Several models get a folder in it each.

        Raises:
            ValueError: the checkpoint lacks something; the message says what.
        """


@runtime_checkable
class CutsBatches(Protocol):
    """A strategy that accumulates over the micro-batches of a batch, as our pipeline does."""

    micro_batches: int


@runtime_checkable
class HasStages(Protocol):
    """A strategy whose ranks do unequal work, as our pipeline's stages do."""

    pipeline_stage: int


@runtime_checkable
class AveragesGradients(Protocol):
    """A strategy that lets a module choose over what gradients are averaged."""

    def reduce_as_gradients(self, tensor: Tensor) -> Tensor:
        """Average a tensor over the ranks whose gradients are averaged in this step."""

    def ends_step(self) -> bool:
        """Whether the optimizer steps after the backward pass of this batch."""

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients of a step by a number that is the same on all ranks, in `on_after_backward`."""


@runtime_checkable
class Compiles(Protocol):
    """A strategy that compiles the module while it is fitted, as ours do."""

    @property
    def is_compiling(self) -> bool:
        """Whether it compiles anything."""

    @property
    def replays_graphs(self) -> bool:
        """Whether what it compiles replays CUDA graphs."""


@runtime_checkable
class SharesCopies(Protocol):
    """A strategy that knows which ranks hold the same module."""

    @property
    def copies(self) -> str | None:
        """A name of the ranks that hold the same as this one, between two steps of the optimizer.

        Ranks that return the same name must have the same parameters and buffers. Which part of a tensor a rank has,
        under FSDP2 and ZeRO-3, the tensor itself says. None if nothing must be equal.
        """


@runtime_checkable
class CountsFlops(Protocol):
    """A LightningModule that knows the cost of training on a batch."""

    def training_flops(self, batch: Any) -> float:
        """Floating-point operations of a forward and backward pass of the whole model on a batch.

        Recomputation that saves memory does not count, and neither do the batches of other ranks.
        """


@runtime_checkable
class NamesInputs(Protocol):
    """A LightningModule whose forward pass on a batch can be tried as `self(self.pipeline_batch(batch)[0])`."""

    def pipeline_batch(self, batch: Any) -> tuple[Any, Any]:
        """Split a batch into the input of the forward pass and what the loss is computed with."""


@runtime_checkable
class HasShardedBlocks(Protocol):
    """A module whose sharded parameters are gathered block by block."""

    def sharded_blocks(self) -> Iterable[nn.Module]:
        """Return the blocks. The forward pass must call each as a module, and no two blocks may share a parameter.

        Parameters outside the blocks, such as embeddings and output matrices tied to them, are gathered for the whole
        step.
        """


@dataclass(frozen=True)
class ChainLayer:
    """One layer of a network that is a chain. Its input is the output of the layer before it.

    Attributes:
        build: builds the layer, with the same parameters at every call and in every process.
        name: unique in the chain.
        kind: the layer type, by which layers are counted when a chain is cut by layer type.
        tied: layers with the same key share one parameter; None for a layer that shares nothing.
        tied_parameter: the name of that parameter in this layer.
    """

    build: Callable[[], nn.Module]
    name: str
    kind: str
    tied: str | None = None
    tied_parameter: str = "weight"
