"""Settles which modules FSDP2 gathers one at a time, where blocks share layers or parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

# The units in which a module or a parameter is found; a place in no unit counts as the whole module.
Homes = dict[nn.Module, set[nn.Module]]

# How many names a message lists.
_SHOWN = 3


def unique(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the blocks in their order, each once."""
    return list(dict.fromkeys(blocks))


def units_of(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """List the modules to shard one by one, those inside of others first, as `fully_shard` needs them.

    FSDP2 gives each parameter to one unit. So a layer that several blocks share becomes a unit of its own, and is
    gathered for each call. A parameter that several blocks share without sharing its layer can only be gathered with
    the rest of the module, and these blocks with it.

    Args:
        module: holds the blocks.
        blocks: as the module names them.
    """
    units = set(blocks)
    while found := _shared_layers(module, units):
        units |= found
    while shared := _in_several(module, units):
        names = {parameter: name for name, parameter in module.named_parameters()}
        shown = ", ".join(sorted(names[each] for each in shared)[:_SHOWN])
        rank_zero_warn(
            f"Several of the sharded blocks of {type(module).__name__} have the parameter {shown}. These blocks are "
            "gathered for the whole step: only their gradients and optimizer state take less memory. A layer that they "
            "share as a module would be gathered by itself."
        )
        units -= set().union(*shared.values())
    # a module has more parts than any module inside of it
    parts = unique([*module.modules(), *blocks])
    return sorted((each for each in parts if each in units), key=lambda unit: len([*unit.modules()]))


def homes_of(module: nn.Module, units: set[nn.Module]) -> Homes:
    """Return the innermost units in which each part of a module is found, by all the ways that lead to it."""
    homes: defaultdict[nn.Module, set[nn.Module]] = defaultdict(set)
    waiting = [(module, module)]
    while waiting:
        each, home = waiting.pop()
        home = each if each in units else home
        if home not in homes[each]:
            homes[each].add(home)
            waiting += [(child, home) for child in each.children()]
    return dict(homes)


def _shared_layers(module: nn.Module, units: set[nn.Module]) -> set[nn.Module]:
    """Return the outermost layers with parameters that are found in several units."""
    shared = {
        each
        for each, homes in homes_of(module, units).items()
        if len(homes) > 1 and any(True for _ in each.parameters()) and type(each).forward is not nn.Module.forward
    }
    inside = {below for each in shared for below in each.modules() if below is not each}
    return shared - inside


def _in_several(module: nn.Module, units: set[nn.Module]) -> dict[nn.Parameter, set[nn.Module]]:
    """Return the parameters that are found in several units, and in which ones, without the whole module."""
    homes: defaultdict[nn.Parameter, set[nn.Module]] = defaultdict(set)
    for each, found in homes_of(module, units).items():
        for parameter in each.parameters(recurse=False):
            homes[parameter] |= found
    return {parameter: found & units for parameter, found in homes.items() if len(found) > 1}


def parts_of(unit: nn.Module, units: set[nn.Module]) -> Iterator[nn.Module]:
    """List the layers of a unit that have parameters, without those of units inside of it."""
    waiting, seen = [unit], set[nn.Module]()
    while waiting:
        each = waiting.pop()
        if each in seen or (each in units and each is not unit):
            continue
        seen.add(each)
        if any(True for _ in each.parameters(recurse=False)):
            yield each
        waiting += each.children()
