"""Turns a module's plain-text plan into torch's tensor parallelism.

| style | layer | each rank keeps | input | output |
|---|---|---|---|---|
| `colwise` | `nn.Linear` | some of the output features | whole | its part of the last dimension |
| `colwise_gather_output` | `nn.Linear` | some of the output features | whole | whole, gathered |
| `rowwise` | `nn.Linear` | some of the input features | its part of the last dimension | whole, summed |
| `rowwise` | `nn.Embedding` | some of the rows | whole | whole, summed |

A `colwise` layer and the `rowwise` one after it need one all-reduce forward and one backward (Shoeybi et al. 2019,
section 3, https://arxiv.org/abs/1909.08053). Layers that the plan does not name compute the same on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.model_parallel.ties import shared_parameters, tie_again

STYLES = ("colwise", "colwise_gather_output", "rowwise")


def cut_tensors(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Cut the layers of a plan over the ranks of a mesh, in place; layers that shared a parameter still do.

    Args:
        module: holds the same parameters on every rank.
        mesh: of one dimension, the tensor-parallel one.
        plan: see `HasTensorParallelPlan`.

    Raises:
        ConfigurationError: the plan does not fit the module, or a matrix does not divide by the size of the mesh.
    """
    styles = match_plan(module, plan)
    for name, style in styles.items():
        _check_divides(name, module.get_submodule(name), style, mesh.size())
    shared = shared_parameters(module)
    parallelize_module(
        module, mesh, {name: _style(module.get_submodule(name), style) for name, style in styles.items()}
    )
    tie_again(module, shared)


def match_plan(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The style of each layer that a plan names, by the layer's full name.

    Raises:
        ConfigurationError: a style is unknown, a pattern names nothing, or a layer that cannot be cut.
    """
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise ConfigurationError(
                f"The tensor-parallel plan says {pattern!r}: {style!r}. Styles are {', '.join(STYLES)}."
            )
        names = list(_matching(module, pattern))
        if not names:
            raise ConfigurationError(
                f"The tensor-parallel plan names {pattern!r}, but {type(module).__name__} has no such layer. Names are "
                "those of named_modules(), and `*` stands for one part between dots."
            )
        for name in names:
            _check_kind(name, module.get_submodule(name), style)
            styles[name] = style
    return styles


def _matching(module: nn.Module, pattern: str) -> Iterator[str]:
    wanted = pattern.split(".")
    for name, _ in module.named_modules():
        parts = name.split(".")
        if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
            yield name


def _check_kind(name: str, layer: nn.Module, style: str) -> None:
    if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Embedding) and style == "rowwise"):
        return
    raise ConfigurationError(
        f"The tensor-parallel plan says {name!r}: {style!r}, but {name} is a {type(layer).__name__}. An nn.Linear can "
        "be cut in every style, an nn.Embedding `rowwise`. Leave other layers out: they compute the same on each rank."
    )


def _check_divides(name: str, layer: nn.Module, style: str, size: int) -> None:
    kept = 1 if style == "rowwise" and isinstance(layer, nn.Linear) else 0
    shape = layer.get_parameter("weight").shape
    if shape[kept] % size:
        raise ConfigurationError(
            f"tensor_parallel_size={size}, but {name} ({style}) has a matrix of {shape[0]} x {shape[1]}, and "
            f"{shape[kept]} does not divide by {size}. Choose a size that divides it, or pad the layer."
        )


def _style(layer: nn.Module, style: str) -> ParallelStyle:
    if style == "rowwise":
        return RowwiseParallel(input_layouts=Replicate() if isinstance(layer, nn.Embedding) else None)
    return ColwiseParallel(output_layouts=Replicate() if style == "colwise_gather_output" else None)
