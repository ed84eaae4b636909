"""Chooses the parts of a module that are compiled apart: each kind of repeated block once, and what is beside them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator

from torch import nn
from torchmetrics import Metric, MetricCollection

from azureml_strategy.interfaces import HasShardedBlocks

# They hold other modules and have no forward of their own.
CONTAINERS = (nn.ModuleList, nn.ModuleDict)
# What computes on the host, or changes with each call. A metric's own steps are no part of the model's.
_LEFT_ALONE = (Metric, MetricCollection)


def kind_of(module: nn.Module) -> Hashable:
    """Return what modules have in common that share a graph: their class, and classes and shapes of what is in them."""
    inside = tuple((name, type(each)) for name, each in module.named_modules())
    tensors = (*module.named_parameters(), *module.named_buffers())
    # Under ZeRO-3 a parameter is empty between its uses. DeepSpeed keeps its shape in `ds_shape`.
    return inside, tuple((name, tuple(getattr(each, "ds_shape", each.shape)), each.dtype) for name, each in tensors)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a module, which it names as `sharded_blocks` or are found by type."""
    return list(module.sharded_blocks() if isinstance(module, HasShardedBlocks) else find_blocks(module))


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Find the outermost parts that a module has several of, one beside the other, in order.

    Two parts with the same content are such a repetition, and then others of their class beside them are blocks as
    well: the first bottleneck of a stage of ResNet has other shapes. A part with a single layer is no block. Two
    networks with blocks of their own are none, such as a student and a teacher; experts in a list of blocks are none.
    """
    return list(_blocks_in(module, set()))


def beside_blocks(module: nn.Module, blocks: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield the outermost parts without a block in them that are worth a graph of their own.

    A single layer of torch's is one kernel already.
    """
    names = [name.split(".") for name, each in module.named_modules() if each in blocks]
    around = {module.get_submodule(".".join(name[:depth])) for name in names for depth in range(len(name))}
    waiting = list(module.children())
    while waiting:
        part = waiting.pop(0)
        if isinstance(part, _LEFT_ALONE) or part in blocks:
            continue
        if part in around or isinstance(part, CONTAINERS):
            waiting += part.children()
        elif _layers(part) > 1 or (_layers(part) and not _is_of_torch(part)):
            yield part


def networks_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost parts of a module that have a forward, for a step that calls them one by one."""
    for part in module.children():
        if isinstance(part, CONTAINERS):
            yield from networks_of(part)
        elif not isinstance(part, _LEFT_ALONE) and _layers(part):
            yield part


def _is_of_torch(module: nn.Module) -> bool:
    """Whether a module's forward is torch's own."""
    return type(module).forward.__module__.startswith("torch.nn.")


def _blocks_in(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    children = [each for each in module.children() if not isinstance(each, _LEFT_ALONE) and each not in seen]
    seen.update(children)
    repeated = defaultdict[type, Counter[Hashable]](Counter)
    for each in children:
        if not isinstance(each, CONTAINERS) and _layers(each) > 1:
            repeated[type(each)][kind_of(each)] += 1
    for each in children:
        is_block = type(each) in repeated and max(repeated[type(each)].values()) > 1 and _layers(each) > 1
        is_listed = isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        inside = [] if is_block and is_listed else list(_blocks_in(each, seen))
        yield from inside or ([each] if is_block else [])


def _layers(module: nn.Module) -> int:
    """Number of layers with parameters or buffers of their own."""
    return sum(any(True for _ in (*each.parameters(False), *each.buffers(False))) for each in module.modules())
