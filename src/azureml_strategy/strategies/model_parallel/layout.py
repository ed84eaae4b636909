"""Plans the device mesh of a job, and adapts the precision plugins to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning.fabric.utilities.types import Steppable
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from azureml_strategy.strategies.errors import ConfigurationError, MeshSizeError
from azureml_strategy.strategies.model_parallel.clipping import clip_gradient_norm
from azureml_strategy.strategies.model_parallel.gradients import NormsOverMeshes

# Lightning's list for its own strategy. Lightning checks it only if the strategy is given as an object.
SUPPORTED = ("32-true", "bf16-mixed", "bf16-true", "16-true")
Size = int | Literal["auto"]


class _NormOverMeshes(Precision):  # a mix-in before Lightning's plugins
    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_gradient_norm(self.main_params(optimizer), clip_val)

    @override
    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        strategy: Any = module.trainer.strategy
        strategy.finish_gradients()  # before the hook on_after_backward, which super() calls
        with NormsOverMeshes():
            return super().post_backward(tensor, module)

    @override
    def _after_closure(self, model: LightningModule, optimizer: Steppable) -> None:
        with NormsOverMeshes():
            super()._after_closure(model, optimizer)


class FullPrecision(_NormOverMeshes):
    """Precision `32-true`."""


class HalfMeshPrecision(_NormOverMeshes, HalfPrecision):
    """Precision `bf16-true` or `16-true`."""


class MixedMeshPrecision(_NormOverMeshes, MixedPrecision):
    """Precision `bf16-mixed`."""


def for_meshes(plugin: Precision) -> Precision:
    """Replace a precision plugin of Lightning's by ours; keep one of the user's class, and refuse other precisions."""
    if plugin.precision not in SUPPORTED:
        raise ConfigurationError(
            f"Trainer(precision={plugin.precision!r}) does not work with azureml_model_parallel. Choose one of "
            f"{', '.join(SUPPORTED)}; 'bf16-mixed' needs no loss scaling, which sharded gradients would not survive."
        )
    if type(plugin) is Precision:
        return FullPrecision()
    if type(plugin) is HalfPrecision:
        return HalfMeshPrecision(plugin.precision)
    if type(plugin) is MixedPrecision:
        return MixedMeshPrecision("bf16-mixed", plugin.device)
    return plugin


@dataclass(frozen=True)
class MeshLayout:
    """Three axes over the ranks of a job.

    Each rank has a place `(data, sequence, tensor)`, of which the last number counts fastest. Ranks of a node are
    consecutive. Groups of tensor and sequence parallelism communicate several times in each layer; they lie within a
    node if their sizes divide the number of the node's processes. The data-parallel axis crosses nodes. Data and
    sequence ranks together share one copy of the parameters.

    Attributes:
        data_parallel_size: replicas that read different samples.
        tensor_parallel_size: ranks that share the layers of a replica and read the same samples.
        sequence_parallel_size: such groups that share the sequences of a replica and read the same samples.
    """

    data_parallel_size: int
    tensor_parallel_size: int
    sequence_parallel_size: int = 1

    @property
    def sharding_size(self) -> int:
        """Ranks over which each parameter is sharded."""
        return self.data_parallel_size * self.sequence_parallel_size


def plan_layout(
    data_parallel_size: Size,
    tensor_parallel_size: Size,
    *,
    num_nodes: int,
    processes_per_node: int,
    cuts_tensors: bool,
    across_nodes: bool = False,
    sequence_parallel_size: int = 1,
) -> MeshLayout:
    """Return the layout of a job, with `auto` replaced by numbers.

    Args:
        data_parallel_size: `auto` is what the other sizes leave.
        tensor_parallel_size: `auto` is what a given `data_parallel_size` leaves; otherwise all processes of a node if
            the module can be cut and its sequences are not, and 1 for any other.
        num_nodes: nodes in the job.
        processes_per_node: processes on each.
        cuts_tensors: whether the module can be cut.
        across_nodes: whether a tensor-parallel group may span nodes.
        sequence_parallel_size: ranks that share each sequence.

    Raises:
        MeshSizeError: a size below 1, sizes that do not multiply to the world size, or a tensor-parallel group that
            would span nodes.
    """
    sequence = sequence_parallel_size
    for name, size in (("data_parallel_size", data_parallel_size), ("tensor_parallel_size", tensor_parallel_size)):
        if size != "auto" and size < 1:
            raise MeshSizeError(f"{name}={size} is no number of processes. Write 1 or more, or 'auto'.")
    if not isinstance(sequence, int) or sequence < 1:
        raise MeshSizeError(f"sequence_parallel_size={sequence} is no number of processes. Write 1 or more.")
    world_size = num_nodes * processes_per_node
    free = processes_per_node if cuts_tensors and sequence == 1 else 1
    if tensor_parallel_size == "auto":
        tensor = free if data_parallel_size == "auto" else max(1, world_size // (data_parallel_size * sequence))
    else:
        tensor = tensor_parallel_size
    data = max(1, world_size // (tensor * sequence)) if data_parallel_size == "auto" else data_parallel_size
    layout = MeshLayout(data, tensor, sequence)
    if data * sequence * tensor != world_size:
        raise MeshSizeError(_not_the_world(layout, num_nodes, processes_per_node))
    if processes_per_node % tensor and not across_nodes:
        raise MeshSizeError(
            f"tensor_parallel_size={tensor} does not divide the {processes_per_node} process(es) of a node, so groups "
            f"would span the {num_nodes} nodes, and every layer would wait for the network several times. Write one of "
            f"{', '.join(map(str, divisors(processes_per_node)))}; or tensor_parallel_across_nodes=True, if that is "
            "meant."
        )
    return layout


def check_counts(size: int, counts: Mapping[str, int], axis: str = "tensor_parallel_size") -> None:
    """Raise MeshSizeError unless the size of a group divides all numbers.

    Args:
        size: ranks of a group, each of which gets an equal share.
        counts: the numbers by what they count, such as `heads`.
        axis: the argument that sets the size.
    """
    for name, count in counts.items():
        if count % size:
            fitting = [each for each in divisors(size) if not any(n % each for n in counts.values())]
            raise MeshSizeError(
                f"{axis}={size}, but the model has {count} {name}, which cannot be shared out equally. Sizes that "
                f"divide both: {', '.join(map(str, fitting))}. Write {axis}={fitting[-1]}, or change the model."
            )


def divisors(number: int) -> list[int]:
    """Return the divisors of a number of 1 or more, in ascending order."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _not_the_world(layout: MeshLayout, num_nodes: int, processes_per_node: int) -> str:
    world_size = num_nodes * processes_per_node
    data, tensor, sequence = layout.data_parallel_size, layout.tensor_parallel_size, layout.sequence_parallel_size
    if sequence > 1:
        return (
            f"data_parallel_size={data} times sequence_parallel_size={sequence} times tensor_parallel_size={tensor} is "
            f"{data * sequence * tensor}, but there are {world_size} processes ({processes_per_node} on each of "
            f"{num_nodes} node(s)). Write a sequence_parallel_size of {', '.join(map(str, divisors(world_size)))}, and "
            "leave the other sizes 'auto'."
        )
    fitting = ", ".join(f"{world_size // size} x {size}" for size in divisors(processes_per_node))
    return (
        f"data_parallel_size={data} times tensor_parallel_size={tensor} is {data * tensor}, but there are {world_size} "
        f"processes ({processes_per_node} on each of {num_nodes} node(s)). Write sizes whose product is {world_size} "
        f"({fitting}), or leave data_parallel_size='auto'."
    )
