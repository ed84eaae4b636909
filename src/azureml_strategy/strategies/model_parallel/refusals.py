"""Refuses what sharded parameters cannot do, and explains torch's errors about them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.model_parallel.fsdp_internals import memory_of

RECOMPUTED_MESH = (
    "A compiled block that tensor parallelism has cut cannot compute its activations again: torch would have to keep a "
    "device mesh for it. Write compile='off', or leave out activation checkpointing."
)
_EXPLAINED = {
    "torch.distributed.device_mesh.DeviceMesh'>": RECOMPUTED_MESH,
    "mixed torch.Tensor and DTensor": (
        "azureml_model_parallel: a sharded parameter (a DTensor) met a whole tensor. A weight is whole while its "
        "block, or a layer that has it, is called as a module. Call the layer instead of using its weight; leave the "
        "block whose weight is used elsewhere out of sharded_blocks(); in callbacks, keep copies as "
        "`parameter.detach().clone()` and set weights by `load_state_dict`. weight_decay of the "
        "optimizer replaces a penalty on all weights."
    ),
    "FSDP does not support deepcopy": (
        "azureml_model_parallel: the module is sharded when on_fit_start runs. Make the copy before: in __init__, as "
        "an attribute of the module (it is sharded with it and can follow it parameter by parameter), or, of the whole "
        "module, in a callback's setup()."
    ),
    "Sharding propagation failed": (
        "azureml_model_parallel: torch has no such operation on a sharded parameter (a DTensor). Use "
        "`parameter.full_tensor()` on all ranks to read it whole."
    ),
}


def refuse_callbacks(callbacks: Iterable[Callback], tensor_parallel: bool) -> None:
    """Refuse callbacks that replace sharded parameters, or compare parameters of two meshes."""
    for callback in callbacks:
        if isinstance(callback, ModelPruning):
            raise ConfigurationError(
                f"{type(callback).__name__} puts masks in the place of parameters, and those of azureml_model_parallel "
                "are sharded, which pruning would meet with an error at the end of the first epoch. Prune under "
                "strategy='azureml_ddp'."
            )
        if tensor_parallel and isinstance(callback, BaseFinetuning):
            raise ConfigurationError(
                f"{type(callback).__name__} compares parameters when it unfreezes some, and torch does not compare "
                "those that tensor parallelism cuts with others. Write tensor_parallel_size=1, or give all parameters "
                "to the optimizer at the start and call requires_grad_() on them in on_train_epoch_start."
            )


def refuse_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that needs all parameters in one vector."""
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError(
            "LBFGS makes one vector of all parameters, and those of azureml_model_parallel are sharded. Use another "
            "optimizer, or strategy='azureml_ddp'."
        )


def refuse_copies(module: nn.Module) -> None:
    """Make a deep copy of a sharded module raise an error with advice; torch only says that there is none."""

    def refuse(_: object) -> NoReturn:
        raise ConfigurationError(
            f"A copy is made of {type(module).__name__}, which fabric.setup has sharded, and torch copies no shards. "
            "Copy it before, and shard the copy alike: `average = AveragedModel(model)`, then `model = "
            "fabric.setup_module(model)` and `fabric.setup_module(average)`; or keep "
            "`parameter.detach().clone()` of each parameter."
        )

    for each in module.modules():
        if isinstance(each, FSDPModule):
            vars(each)["__deepcopy__"] = refuse


def refuse_scalars(module: nn.Module) -> None:
    """Refuse parameters without a dimension to shard, and name them."""
    scalars = [name for name, parameter in module.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise ConfigurationError(
            f"{', '.join(scalars[:3])} of {type(module).__name__} has no dimension, and FSDP2 shards the first one. "
            "Make it a vector of one number: nn.Parameter(torch.ones(1)) instead of nn.Parameter(torch.tensor(1.0))."
        )


class ParameterMemory:
    """Refuses the next step after `parameter.data = ...`, which FSDP2 does not notice: it trains the old memory."""

    def __init__(self, module: nn.Module) -> None:
        sharded = [(name, each) for name, each in module.named_parameters() if isinstance(each, DTensor)]
        self._before = [(name, each, memory_of(each)) for name, each in sharded]

    def require_same(self) -> None:
        """Raise ConfigurationError if the data of a parameter was replaced."""
        for name, parameter, memory in self._before:
            if memory_of(parameter) != memory:
                raise ConfigurationError(
                    f"The data of {name} was replaced, as by `parameter.data = ...`, but a sharded parameter (a "
                    "DTensor) keeps its memory, so that this has no effect. Write `parameter.data.copy_(...)`, or "
                    "change it in place, as by `parameter.data.clamp_(...)`."
                )


def explain(error: BaseException) -> None:
    """Add advice to an error of torch's about sharded parameters."""
    for words, explanation in _EXPLAINED.items():
        if words in str(error) and explanation not in getattr(error, "__notes__", ()):
            error.add_note(explanation)
