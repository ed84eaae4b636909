"""Cuts a module: layers by tensor-parallel styles, blocks by FSDP2. Tied parameters stay tied."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from azureml_strategy.huggingface.loading import fill_all, refuse_lost_values
from azureml_strategy.huggingface.transformers_internals import cache_class
from azureml_strategy.strategies.activation_checkpointing import checkpointed
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.host_memory import large_blocks_returned
from azureml_strategy.strategies.mixed_precision import make_contiguous
from azureml_strategy.strategies.model_parallel.checkpoint import copy_from_rank_zero
from azureml_strategy.strategies.model_parallel.gradients import SumsGradients, uncut_parameters
from azureml_strategy.strategies.model_parallel.layout import check_counts
from azureml_strategy.strategies.model_parallel.module import (
    counts_of,
    plan_of,
    refuse_two_checkpointings,
    sharded_blocks_of,
)
from azureml_strategy.strategies.model_parallel.refusals import refuse_scalars
from azureml_strategy.strategies.model_parallel.units import units_of
from azureml_strategy.strategies.second_derivatives import refuse_second_derivatives

# All places of one parameter: the name of the submodule, and the parameter's name in it.
Places = list[tuple[str, str]]

# Methods of a module that Lightning calls instead of its forward.
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# How a layer is cut. `sum_gradients` leaves it whole and sums its gradients, as each rank computes a part of them.
STYLES = ("colwise", "colwise_gather_output", "rowwise", "sum_gradients")


def spread(
    module: nn.Module, mesh: DeviceMesh, device: torch.device, *, precision: str, activation_checkpointing: bool
) -> list[nn.Parameter]:
    """Cut and shard a module that still holds all its parameters. Every rank must call this.

    Args:
        module: may have the methods of `HasTensorParallelPlan` and `HasShardedBlocks`, or hold a model of transformers.
            Weights that are still in files are read when their shards are known.
        mesh: its axes are `data_parallel` and `tensor_parallel`.
        device: of this rank.
        precision: as in `Trainer(precision=...)`.
        activation_checkpointing: keep only the inputs of each sharded block.

    Returns:
        The parameters of which all ranks of a tensor-parallel group hold the same part.

    Raises:
        ConfigurationError: the plan does not fit the module, or there is none (MissingPlanError).
    """
    tensor_mesh = mesh["tensor_parallel"]
    plan = plan_of(module, tensor_mesh.size()) if tensor_mesh.size() > 1 else {}
    if plan:
        check_counts(tensor_mesh.size(), counts_of(module))
    if activation_checkpointing:
        refuse_two_checkpointings(module)
    refuse_lost_values(module)
    refuse_scalars(module)
    make_contiguous(module)
    copy_from_rank_zero(module, device)
    if plan:
        cut_tensors(module, tensor_mesh, plan)
    blocks = list(dict.fromkeys(sharded_blocks_of(module)))
    if not blocks:
        rank_zero_warn(
            f"{type(module).__name__} names no blocks, so each rank gathers all its parameters for the whole step: "
            "only gradients and optimizer state take less memory. Give it a method sharded_blocks() that returns its "
            "layers."
        )
    if activation_checkpointing:
        checkpoint_activations(blocks)
    shard_parameters(module, mesh["data_parallel"], blocks, precision)
    with large_blocks_returned():
        fill_all(module, device)
    return uncut_parameters(module, "tensor_parallel") if plan else []


def shared_parameters(module: nn.Module) -> list[Places]:
    """List the places of each parameter that has more than one."""
    places: defaultdict[nn.Parameter, Places] = defaultdict(list)
    for owner, submodule in module.named_modules():
        for name, parameter in submodule.named_parameters(recurse=False):
            places[parameter].append((owner, name))
    return [owners for owners in places.values() if len(owners) > 1]


def tie_again(module: nn.Module, shared: list[Places]) -> None:
    """Tie parameters of `shared_parameters` again after each place was cut separately; refuse different cuts."""
    for places in shared:
        parameters = [module.get_submodule(owner).get_parameter(name) for owner, name in places]
        if len({getattr(parameter, "placements", None) for parameter in parameters}) > 1:
            raise ConfigurationError(
                f"{' and '.join(f'{owner}.{name}' for owner, name in places)} are one parameter, but the "
                "tensor-parallel plan cuts them in different ways. Rows of a tied embedding are columns of the output "
                "matrix: write 'rowwise' for the one and 'colwise_gather_output' for the other, or name neither."
            )
        for owner, name in places[1:]:
            module.get_submodule(owner).register_parameter(name, parameters[0])


def is_parallel(module: nn.Module) -> bool:
    """Whether any parameter is already spread over ranks."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def reshard(module: nn.Module) -> None:
    """Make a module's parameters shards again.

    A pass that did not go through the module may have left them whole. So has an evaluation: FSDP2 keeps the root's
    parameters for a backward pass.
    """
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def checkpoint_activations(blocks: Sequence[nn.Module]) -> None:
    """Keep only the inputs of each block, and recompute the rest in the backward pass."""
    for block in blocks:
        # FSDP2's hooks wrap this forward, so that a block is gathered once for its whole backward pass
        block.forward = functools.partial(_call_without_cache, checkpointed(block), block.forward, cache_class())


def _call_without_cache(
    call: Callable[..., Any], forward: Callable[..., Any], kind: type | None, *args: Any, **kwargs: Any
) -> Any:
    """Call a block without its cache: the backward pass calls it again and would add its tokens once more."""
    if kind is not None and torch.is_grad_enabled():
        for each in (*args, *kwargs.values()):
            if isinstance(each, kind) and each.get_seq_length() > 0:  # type: ignore[attr-defined]
                raise ConfigurationError(
                    "A block was given keys and values of earlier tokens, as prefix tuning does, and a block that is "
                    "computed again would add to them once more. Write activation_checkpointing=False."
                )
        args = tuple(None if isinstance(each, kind) else each for each in args)
        kwargs = {name: None if isinstance(each, kind) else each for name, each in kwargs.items()}
    return call(forward, *args, **kwargs)


def shard_parameters(module: nn.Module, mesh: DeviceMesh, blocks: Sequence[nn.Module], precision: str) -> None:
    """Shard each block over a data-parallel mesh, and the rest of the module as one more block.

    A LightningModule's four steps gather the parameters outside the blocks, as its forward does. On a mesh of one rank
    there is nothing to shard, but all parameters still become DTensors: torch's foreach and fused optimizers do not
    take DTensors beside plain tensors.
    """
    half = torch.bfloat16 if precision == "bf16-mixed" else None
    inside = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    units = units_of(module, blocks)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=inside)
    # do not cast the batch: its floats may be targets
    around = MixedPrecisionPolicy(inside.param_dtype, inside.reduce_dtype, cast_forward_inputs=False)
    fully_shard(module, mesh=mesh, mp_policy=around)
    if mesh.device_type == "cpu":
        for each in (*units, module):
            # gloo takes a sum for an average before torch 2.9: https://github.com/pytorch/pytorch/issues/162338
            cast(FSDPModule, each).set_force_sum_reduction_for_comms(True)
    for step in filter(lambda name: hasattr(module, name), _STEPS):
        register_fsdp_forward_method(module, step)


def cut_tensors(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Cut the layers of a plan over a tensor-parallel mesh, in place. Layers that shared a parameter still do.

    Raises:
        ConfigurationError: the plan does not fit the module, or the size of the mesh does not divide a matrix.
    """
    matched = match_plan(module, plan)
    styles = {name: style for name, style in matched.items() if style != "sum_gradients"}
    for name, style in styles.items():
        _check_divides(name, module.get_submodule(name), style, mesh.size())
    shared = shared_parameters(module)
    for name, style in styles.items():  # one by one: torch 2.8 takes layers.0.1 for layers.1 too
        layer = module.get_submodule(name)
        parallelize_module(layer, mesh, _style(layer, style))
        refuse_second_derivatives(layer)
    tie_again(module, shared)
    for name in matched.keys() - styles.keys():
        module.get_submodule(name).register_forward_pre_hook(SumsGradients(mesh.get_group()))


def match_plan(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the style of each layer of a plan, by the layer's full name.

    Raises:
        ConfigurationError: a style is unknown, or a pattern names no layer or a layer that cannot be cut.
    """
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise ConfigurationError(
                f"The tensor-parallel plan says {pattern!r}: {style!r}. Styles are {', '.join(STYLES)}."
            )
        names = _matching(module, pattern)
        if not names:
            raise ConfigurationError(
                f"The tensor-parallel plan names {pattern!r}, but {type(module).__name__} has no such layer. Names are "
                "those of named_modules(), and `*` stands for one part between dots."
            )
        for name in names:
            _check_kind(name, module.get_submodule(name), style)
            styles[name] = style
    return styles


def _matching(module: nn.Module, pattern: str) -> list[str]:
    wanted = pattern.split(".")
    split = {name: name.split(".") for name, _ in module.named_modules()}
    return [name for name, parts in split.items() if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))]


def _check_kind(name: str, layer: nn.Module, style: str) -> None:
    if style == "sum_gradients" or isinstance(layer, nn.Linear):
        return
    if isinstance(layer, nn.Embedding) and style == "rowwise":
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
