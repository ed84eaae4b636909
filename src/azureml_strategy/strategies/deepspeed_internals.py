"""Every private name of DeepSpeed that this package uses, where DeepSpeed has no public way.

`INTERNALS` gives the reason for each. The private names of Lightning's DeepSpeed strategy are in
`lightning_internals.py`. This file imports DeepSpeed only inside its functions: where DeepSpeed is missing, our
strategies say so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# The number that stages 1 and 2 give to the backward passes of a step before the first one.
INITIAL_STEP = -1
INTERNALS: dict[str, dict[str, str]] = {
    # What `StageEngine` and `StageModule` use on themselves, some for each micro-batch.
    "deepspeed.runtime.pipe.engine.PipelineEngine": {
        "_INSTRUCTION_MAP": "extended: measures passes, and leaves the optimizer step to Lightning's loop",
        "_compute_loss": "set before an evaluation, as eval_batch does",
        "_exec_backward_pass": "a backward pass, which is measured",
        "_exec_forward_pass": "a forward pass, which is measured",
        "_exec_optimizer_step": "the optimizer step, when Lightning's loop takes it",
        "_exec_reduce_grads": "the reduction over replicas, which is measured",
        "_exec_reduce_tied_grads": "the reduction of what stages share, which is measured",
        "_exec_schedule": "evaluates without eval_batch, which waits for all replicas",
    },
    "deepspeed.runtime.pipe.module.PipelineModule": {
        "_local_start": "the index of the stage's first layer in the chain",
        "_partition_layers": "overridden: the chain is cut already",
        "_set_bounds": "tells DeepSpeed where",
    },
    # What the functions below use.
    "deepspeed.ops": {
        "__compatible_ops__": "which operations DeepSpeed would compile",
    },
    "deepspeed.runtime.engine.DeepSpeedEngine": {
        "_config": "the configuration of an engine that exists, to change what it loads",
    },
    "deepspeed.runtime.zero.partition_parameters.Init": {
        "_zero_init_param": "extended: casts the parameters of a layer before they are cut",
    },
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": {
        "_grad_acc_hooks": "takes them off the parameters at the end of a training; the other optimizers have them too",
        "_leaf_module_hooks": "takes them off the modules",
    },
    "deepspeed.utils.groups": {
        "_release_process_group_references": "forgets the groups of a former Trainer, which may be destroyed",
    },
}


def compile_no_operations() -> None:
    """Keep DeepSpeed from compiling operations for the CPU.

    Its shared-memory all-reduce would take two minutes to compile. Only inference and tensor parallelism call it, and
    gloo's replaces it. To ask DeepSpeed what else it can compile starts compilers, too.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}


class ReusedGroups:
    """Gives DeepSpeed the process groups again that it made for an earlier training in this process.

    DeepSpeed makes them anew for each training and frees none. One of NCCL's holds 390 MB of a GPU (measured on an
    H100), and a pipeline has five. Within a training, each request for the same ranks gets another group.
    """

    def __init__(self) -> None:
        self._world: object = None
        self._made: dict[tuple[int, ...], list[Any]] = {}
        self._given: Counter[tuple[int, ...]] = Counter()

    def begin(self) -> None:
        """Begin a training: the groups of earlier ones may be given again."""
        self._given.clear()
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is not self._world:  # the groups have ended with the former world
            self._world = world
            self._made.clear()

    def give(self, make: Callable[[Iterable[int]], Any], ranks: Iterable[int]) -> Any:
        """Return a group of these ranks. All ranks must call this, as `make` is a collective."""
        key = tuple(ranks)
        made = self._made.setdefault(key, [])
        if self._given[key] == len(made):
            made.append(make(list(key)))
        self._given[key] += 1
        return made[self._given[key] - 1]


_reused = ReusedGroups()


def forget_groups() -> None:
    """Make DeepSpeed ask for its process groups anew.

    It keeps those of this process's last Trainer, but they may be destroyed, or made for tensor parallelism.
    """
    from deepspeed.utils import groups

    groups._release_process_group_references()


def reuse_groups() -> None:
    """Begin a training whose process group has started; see `ReusedGroups`."""
    from deepspeed import comm

    _reused.begin()
    backend = comm.comm.cdb  # None until DeepSpeed has taken the process group
    if backend is not None and "new_group" not in vars(backend):
        backend.new_group = partial(_reused.give, backend.new_group)


def let_go(engine: DeepSpeedEngine) -> None:
    """Take an engine's hooks off its module when a training has ended. DeepSpeed leaves them there.

    The gradients of a second training would pass through the first one's buffers too. On a GPU, another stream may read
    these meanwhile: the numbers would be wrong, without an error. And the engine with the state of its optimizer would
    never be freed. The hooks that gather parameters of ZeRO 3 for a call of the module stay.
    """
    from deepspeed.runtime.zero import parameter_offload

    for name in ("_grad_acc_hooks", "_leaf_module_hooks"):
        hooks = getattr(engine.optimizer, name, [])
        for hook in hooks:
            hook.remove()
        hooks.clear()
    for handle in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
        if handle is not None:
            handle.remove()
    modules = set(map(id, engine.module.modules()))
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if id(module) not in modules]
    if hasattr(engine, "pipe_buffers"):
        # Their graphs refer to the engine in a way that Python's garbage collector does not see.
        engine.loss = None
        for buffers in engine.pipe_buffers.values():
            buffers[:] = [None] * len(buffers)


def load_universal_checkpoint(engine: DeepSpeedEngine) -> None:
    """Make an engine load universal checkpoints. It reads this flag when it loads, and nothing else depends on it."""
    engine._config.load_universal_checkpoint = True


def zero_init(config: dict[str, Any], remote_device: str | None) -> AbstractContextManager[Any]:
    """Cut the parameters of each layer as it is built, by `deepspeed.zero.Init`, and leave buffers what they are.

    With bf16, DeepSpeed would make every tensor of a constructor bf16. Positions above 256, rotary frequencies and
    running statistics, which training keeps in float32, would be rounded, and weights would be drawn in bf16. Here the
    parameters of a layer are cast when its constructor has ended.

    Args:
        config: DeepSpeed's configuration.
        remote_device: where the parts of parameters lie, `cpu` or `nvme`; None is the device.
    """
    import deepspeed
    from deepspeed.runtime.zero import DeepSpeedTensorOverride

    class CastingInit(deepspeed.zero.Init):  # type: ignore[misc] # DeepSpeed has no annotations
        def _zero_init_param(self, param: nn.Parameter) -> None:
            if param.is_floating_point():
                param.data = param.data.to(self.dtype)
            super()._zero_init_param(param)

    overrides = [DeepSpeedTensorOverride.device]
    context: AbstractContextManager[Any] = CastingInit(
        remote_device=remote_device, config_dict_or_path=config, tensor_overrides=overrides
    )
    return context


class FlatSlice:
    """The contiguous numbers of a flattened parameter and of its gradient that this rank keeps under ZeRO.

    Args:
        parameter: one that `is_of_zero`.

    Attributes:
        start: the place of the slice's first number.
        group_size: number of ranks that keep slices of one gradient.
        scale: the factor by which DeepSpeed has multiplied the loss, in float16.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._of_stage_3 = hasattr(parameter, "ds_id")
        self._parameter = cast(Any, parameter)
        group = self._parameter.ds_process_group if self._of_stage_3 else self._parameter._dp_group
        self.group_size = dist.get_world_size(group)
        optimizer = _zero_optimizer(parameter)
        self.scale = 1.0 if optimizer is None else float(optimizer.loss_scale)
        if self._of_stage_3:
            self.start = dist.get_rank(group) * self._parameter.ds_tensor.numel()
        else:
            mapping = self._parameter._hp_mapping
            self.start = 0 if mapping is None else mapping.lp_fragment_address.start

    def read(self) -> Tensor | None:
        """Return the slice of the gradient or a copy of it; None if this rank keeps no number of the gradient."""
        if self._of_stage_3:
            part: Tensor = self._parameter._z3_optimizer.get_local_fp32_grad_for_param(self._parameter)
            return part
        mapping = self._parameter._hp_mapping
        if mapping is None:
            return None
        kept: Tensor = mapping.get_lp_grad_fragment(self._parameter._index_in_param_group).view(-1)
        length = mapping.lp_fragment_address.numel
        # The bfloat16 optimizer keeps whole gradients.
        return kept if kept.numel() == length else kept.narrow(0, self.start, length)

    @property
    def group(self) -> int | None:
        """The optimizer's parameter group; None if this rank keeps no number of the gradient."""
        if self._of_stage_3:
            optimizer = _zero_optimizer(self._parameter)
            number, _, _ = optimizer.grad_position[optimizer.get_param_id(self._parameter)]
            return int(optimizer.sub_group_to_group_id[number])
        mapping = self._parameter._hp_mapping
        return None if mapping is None else int(mapping.param_group_index)

    def trained(self) -> Tensor | None:
        """Return the slice of what the optimizer trains, in place; None if there is none or it is not on the device."""
        if self._of_stage_3:
            optimizer = _zero_optimizer(self._parameter)
            number, start, length = optimizer.grad_position[optimizer.get_param_id(self._parameter)]
            flat = optimizer.fp32_partitioned_groups_flat[number]
            if flat is None or flat.numel() < start + length:  # on a disk
                return None
            found: Tensor = flat.detach().narrow(0, start, length)
        elif self._parameter._hp_mapping is None:
            return None
        else:
            found = self._parameter._hp_mapping.get_hp_fragment().detach()
        return found if found.device == self._parameter.device else None

    def write(self, part: Tensor) -> None:
        """Replace the slice of the gradient."""
        optimizer = _zero_optimizer(self._parameter)
        if self._of_stage_3:
            optimizer.set_local_grad_for_param(part, self._parameter)
            return
        kept = self.read()
        assert kept is not None
        kept.copy_(part)
        if getattr(optimizer, "cpu_offload", False):
            # On the host, DeepSpeed takes the norm and looks for infinities when a gradient arrives.
            optimizer.norm_for_param_grads[optimizer.get_param_id(self._parameter)] = torch.linalg.vector_norm(
                kept, dtype=torch.float32
            )
            optimizer.update_offload_overflow_tracker(kept)

    def gather(self) -> Tensor:
        """Return the whole gradient in float32. This is a collective of the ranks that keep slices."""
        if self._of_stage_3:
            whole: Tensor = self._parameter._z3_optimizer.get_fp32_grad_for_param(self._parameter)
        else:
            whole = self._parameter.get_full_hp_grad()
        return whole


def is_of_zero(parameter: nn.Parameter) -> bool:
    """Tell whether DeepSpeed keeps the gradient of a parameter: ZeRO's optimizer trains it, or the bfloat16 one."""
    if hasattr(parameter, "ds_id"):
        optimizer = _zero_optimizer(parameter)
        return optimizer is not None and optimizer.get_param_id(parameter) in optimizer.grad_position
    return hasattr(parameter, "_hp_mapping")


def has_gradients(parameter: nn.Parameter) -> bool:
    """Tell whether this is between the last backward pass of a step and the step. With offload it is always True."""
    optimizer: Any = _zero_optimizer(parameter)
    kept = getattr(optimizer, "averaged_gradients", None)
    offloads = getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)
    return kept is None or bool(offloads) or any(each is not None for each in kept.values())


def float32_copy(parameter: nn.Parameter) -> Tensor | None:
    """Return the whole gradient that the bfloat16 optimizer keeps on each rank; None if another optimizer trains it."""
    return getattr(parameter, "_hp_grad", None)


def drop_stale_gradients(engine: DeepSpeedEngine) -> None:
    """Empty the slices on the host to which no gradient came in this step. DeepSpeed has a norm of each that did.

    DeepSpeed copies gradients into buffers as they come. ZeRO 3 and offloaded optimizers never empty them: a layer that
    was used once would be trained by the same gradient in each later step.
    """
    optimizer: Any = engine.optimizer
    if getattr(optimizer, "cpu_offload", False):
        for group, parameters in enumerate(optimizer.params_in_partition):
            for parameter, kept in zip(parameters, optimizer.offload_gradient_dict[group], strict=True):
                if optimizer.get_param_id(parameter) not in optimizer.norm_for_param_grads:
                    kept.zero_()
    elif getattr(optimizer, "offload_optimizer", False):
        for number, (group, start, length) in optimizer.grad_position.items():
            kept = optimizer.fp32_partitioned_groups_flat[group].grad
            if kept is not None and number not in optimizer.norm_for_param_grads:
                kept.narrow(0, start, length).zero_()


def forget_gradients(engine: DeepSpeedEngine) -> None:
    """Empty ZeRO 3's slices of gradients, after a step."""
    optimizer: Any = engine.optimizer
    kept = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if kept is not None:
        kept.zero_()
        if optimizer.offload_optimizer:
            optimizer.norm_for_param_grads.clear()  # as ZeRO 1 and 2 do


def discard_gradients(engine: DeepSpeedEngine) -> None:
    """Forget the gradients of a backward pass that no step has followed, as `zero_grad` of torch's optimizers does.

    DeepSpeed's `zero_grad` keeps those that are averaged already, and stages 1 and 2 add the next ones to some of them.
    """
    optimizer: Any = engine.optimizer
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        for kept in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            kept.update(dict.fromkeys(kept))
        optimizer.micro_step_id = INITIAL_STEP
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
    forget_gradients(engine)


def can_add_gradients(engine: DeepSpeedEngine) -> bool:
    """Tell whether gradients of more backward passes than DeepSpeed counts on can be added up before a step."""
    optimizer: Any = engine.optimizer
    of_stage_3 = hasattr(optimizer, "grad_partitions_flat_buffer")
    offloads = getattr(optimizer, "cpu_offload", False) and not of_stage_3
    return not (offloads or getattr(optimizer, "use_grad_accum_attribute", False))


def begin_further_backward(engine: DeepSpeedEngine) -> dict[int, list[Tensor]]:
    """Have a second backward pass before a step add to the gradients that are there; see `end_further_backward`.

    Returns:
        The gradients that stages 1 and 2 would overwrite, by group.
    """
    optimizer: Any = engine.optimizer
    if hasattr(optimizer, "grad_partitions_flat_buffer"):
        optimizer.micro_step_id = max(optimizer.micro_step_id, 1)  # the pass with number 0 overwrites
        return {}
    kept = getattr(optimizer, "averaged_gradients", {})
    return {group: list(gradients) for group, gradients in kept.items() if gradients is not None}


def end_further_backward(engine: DeepSpeedEngine, earlier: dict[int, list[Tensor]]) -> None:
    """Add the gradients that were there before the backward pass."""
    optimizer: Any = engine.optimizer
    for group, gradients in earlier.items():
        for new, before in zip(optimizer.averaged_gradients[group], gradients, strict=True):
            if new.data_ptr() != before.data_ptr():  # in 16 bits, stage 2 adds by itself
                new.add_(before)


def flat_memory(engine: DeepSpeedEngine) -> list[Tensor]:
    """Return the flat tensors of whole parameters, one for each group; none under stage 3."""
    optimizer: Any = engine.optimizer
    flat: list[Tensor] = getattr(optimizer, "bit16_groups_flat", getattr(optimizer, "bf16_groups_flat", []))
    return flat


def flat_parameters(engine: DeepSpeedEngine) -> list[nn.Parameter]:
    """Return the parameters that are views of `flat_memory`."""
    optimizer: Any = engine.optimizer
    groups = getattr(optimizer, "bit16_groups", getattr(optimizer, "bf16_groups", []))
    return [each for group in groups for each in group]


def trained_copies(engine: DeepSpeedEngine) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's parts of the parameters, each with the copy on the same device that the optimizer trains.

    Parts without such a copy are left out: ZeRO 3 trains float32 parts themselves.
    """
    optimizer: Any = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        pairs = zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True)
        found = [(part, copy.detach()) for part, copy in pairs if part is not None and copy is not None]
    else:
        bf16 = hasattr(optimizer, "fp32_groups_flat_partition")
        names = ("bf16_partitioned_groups", "fp32_groups_flat_partition")
        if not bf16:
            names = ("parallel_partitioned_bit16_groups", "single_partition_of_fp32_groups")
        parts, copies = (getattr(optimizer, name, []) for name in names)
        ranks = [dist.get_rank(group) for group in getattr(optimizer, "real_dp_process_group", [])]
        found = [(of_ranks[rank], copy.detach()) for of_ranks, copy, rank in zip(parts, copies, ranks, strict=False)]
    return [
        (part, copy)
        for part, copy in found
        if part.device == copy.device and part.numel() == copy.numel() and part.data_ptr() != copy.data_ptr()
    ]


def persistent_parameters(engine: DeepSpeedEngine) -> list[nn.Parameter]:
    """Return ZeRO 3's small parameters. Once used, each stays whole between steps, beside its parts."""
    optimizer: Any = engine.optimizer
    found: list[nn.Parameter] = [
        each for each in getattr(optimizer, "persistent_parameters", []) if each.ds_tensor.device == each.device
    ]
    return found


def part_of_whole(parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a whole parameter of ZeRO 3, and DeepSpeed's copy of that part. Both may be empty."""
    cut = cast(Any, parameter)
    start = min(dist.get_rank(cut.ds_process_group) * cut.ds_tensor.numel(), cut.ds_numel)
    length = min(cut.ds_tensor.numel(), cut.ds_numel - start)
    return parameter.detach().reshape(-1).narrow(0, start, length), cut.ds_tensor.narrow(0, 0, length)


def is_whole(parameter: nn.Parameter) -> bool:
    """Tell whether a parameter of ZeRO 3 has its values at this moment."""
    return str(cast(Any, parameter).ds_status.name) == "AVAILABLE"


def _zero_optimizer(parameter: nn.Parameter) -> Any:
    """Return ZeRO's optimizer of a parameter; None if this rank keeps nothing of its gradient."""
    return getattr(parameter, "_z3_optimizer", getattr(parameter, "_zero_optimizer", None))
