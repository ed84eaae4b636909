"""A network as a chain of layers. Each layer is built separately, with the same parameters in every process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from azureml_strategy.interfaces import ChainLayer


def seeded(make: Callable[[], nn.Module], seed: int, index: int) -> Callable[[], nn.Module]:
    """Return a builder that uses its own random state and leaves the process's state unchanged.

    Args:
        make: draws its parameters from torch's default generators.
        seed: of the whole network.
        index: of this draw. Layers that share a parameter must draw it first, and from the same index.
    """
    return functools.partial(_build_seeded, make, seed, index)


def build_chain(layers: Sequence[ChainLayer]) -> nn.ModuleList:
    """Build all layers in one process. Tied layers share one parameter."""
    modules = nn.ModuleList(layer.build() for layer in layers)
    shared: dict[str, nn.Parameter] = {}
    for layer, module in zip(layers, modules, strict=True):
        if layer.tied is not None:
            parameter = shared.setdefault(layer.tied, module.get_parameter(layer.tied_parameter))
            owner, _, name = layer.tied_parameter.rpartition(".")
            setattr(module.get_submodule(owner), name, parameter)
    return modules


def _build_seeded(make: Callable[[], nn.Module], seed: int, index: int) -> nn.Module:
    # torch's CPU generator takes 32 bits of a seed. This mixes all bits of both numbers into them.
    mixed = int(np.random.SeedSequence([seed, index]).generate_state(1)[0])
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(mixed)
        return make()
