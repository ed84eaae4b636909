"""Runs the module's step on the last stage, and logs on all stages what it logged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from azureml_strategy.strategies.pipeline.chain import Chain
from azureml_strategy.strategies.pipeline.micro_batches import MicroBatch
from azureml_strategy.strategies.pipeline.partition import PipelineError
from azureml_strategy.strategies.pipeline.refusals import refuse_changes_in_step

_ARGUMENTS = inspect.signature(LightningModule.log)
# These reduce the values of micro-batches to the batch's, as `reduce_fx` reduces those of batches to the epoch's.
_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # The plain mean if all weights are 0: a step would log NaN, of 0 / 0.
    "mean": lambda values, weights: torch.where(
        weights.any(), (values * weights).sum() / weights.sum().clamp(min=1e-9), values.mean()
    ),
    "sum": lambda values, weights: values.sum(),
    "max": lambda values, weights: values.max(),
    "min": lambda values, weights: values.min(),
}


@dataclass
class _Entry:
    arguments: dict[str, Any]
    values: list[Tensor]
    weights: list[Tensor]


class SharedLogs:
    """Records `self.log` calls during the micro-batches of a batch, and repeats them once per batch on all stages.

    The last stage sends the names with the first batch. They stay the same, so that no later step waits to learn how
    many there are.

    Args:
        module: the module that logs.
        source: global rank of the last stage of this replica.
        pipe_group: the ranks of this replica.
        data_group: the ranks of this stage, over which `sync_dist=True` reduces.
    """

    def __init__(self, module: LightningModule, source: int, pipe_group: Any, data_group: Any) -> None:
        self._module = module
        self._source, self._pipe_group, self._data_group = source, pipe_group, data_group
        self._entries: dict[str, _Entry] = {}
        self._known: dict[Any, list[tuple[str, dict[str, Any]]]] = {}
        self._fault: Exception | None = None

    @contextmanager
    def recording(self, samples: int) -> Iterator[None]:
        """Record the `self.log` calls of a micro-batch of this many samples instead of executing them."""

        def log(*args: Any, **kwargs: Any) -> None:
            self._record(samples, _ARGUMENTS.bind(self._module, *args, **kwargs).arguments)

        self._module.log = log  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._module.log

    def run(self, key: Any, outputs: Any, step: Callable[[], Tensor]) -> Tensor:
        """Run the step of a micro-batch, which returns the loss of the pipeline's outputs.

        An error in the first batch, by `key` of `repeat`, is raised when all stages have run their parts.
        """
        if key in self._known:
            return step()
        if self._fault is None:
            try:
                return step()
            except Exception as error:
                self._fault = error
        floats = [each for each in tree_leaves(outputs) if isinstance(each, Tensor) and each.is_floating_point()]
        return torch.stack([each.sum() * 0 for each in floats]).sum()

    def repeat(self, key: Any) -> None:
        """Log on every stage what the last stage recorded.

        Args:
            key: identifies the step; equal keys log equal names.

        Raises:
            PipelineError: the step logged other names than the first time, or failed in its first batch; the last stage
                raises the step's own error.
        """
        entries, self._entries = self._entries, {}
        names = self._agree_on_names(key, [(name, entry.arguments) for name, entry in entries.items()])
        if not names:
            return
        values = self._broadcast_values(names, entries)
        for (name, arguments), (value, weight) in zip(names, values, strict=True):
            given = dict(arguments)
            if "batch_size" in given:
                # A tensor, so that nothing waits for the GPU. A whole number, as Lightning's sum of weights is one.
                given["batch_size"] = weight.round().long()
            if given.get("sync_dist"):
                given["sync_dist_group"] = self._data_group
            self._module.log(name, value.float(), **given)

    def _record(self, samples: int, given: dict[str, Any]) -> None:
        name, value = given["name"], given["value"]
        arguments = {key: each for key, each in given.items() if key not in ("self", "name", "value")}
        _refuse_unsupported_log(name, value, arguments)
        entry = self._entries.setdefault(name, _Entry(arguments, [], []))
        given_weight = arguments.get("batch_size")
        entry.values.append(self._number(value))
        entry.weights.append(self._number(samples if given_weight is None else given_weight))

    def _number(self, value: Any) -> Tensor:
        """Return a number in float64, which counts tokens beyond 2^24; the host does not wait for the device."""
        device = self._module.device
        if isinstance(value, Tensor):
            return value.detach().to(device, torch.float64, non_blocking=True).squeeze()
        return torch.full((), value, dtype=torch.float64, device=device)  # a kernel gets the number with its launch

    def _agree_on_names(self, key: Any, logged: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
        if key not in self._known:
            fault, self._fault = self._fault, None
            sent = [(logged, None if fault is None else f"{type(fault).__name__}: {fault}")]
            dist.broadcast_object_list(sent, src=self._source, group=self._pipe_group)
            self._known[key], words = sent[0]
            if fault is not None:
                raise fault
            if words is not None:
                raise PipelineError(f"{key[0]} failed on the last stage, in its first batch. {words}")
        known = self._known[key]
        names, first = [name for name, _ in logged], [name for name, _ in known]
        if dist.get_rank() == self._source and names != first:
            raise PipelineError(
                f"{key[0]} logged {', '.join(names) or 'nothing'}, but {', '.join(first) or 'nothing'} with its first "
                "batch. In a pipeline the names must be the same in each batch: log 0 or NaN where there is no value."
            )
        return known

    def _broadcast_values(self, names: list[tuple[str, dict[str, Any]]], entries: dict[str, _Entry]) -> Tensor:
        """Broadcast value and weight of each name, shape `(names, 2)`."""
        device = self._module.device
        shared = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
        if dist.get_rank() == self._source:
            for row, entry in zip(shared, entries.values(), strict=True):
                weights = torch.stack(entry.weights)
                reduce = _REDUCTIONS[entry.arguments.get("reduce_fx", "mean")]
                row[0], row[1] = reduce(torch.stack(entry.values), weights), weights.sum()
        dist.broadcast(shared, src=self._source, group=self._pipe_group)
        return shared


def _refuse_unsupported_log(name: str, value: Any, arguments: dict[str, Any]) -> None:
    if not isinstance(value, (int, float, Tensor)):
        raise PipelineError(
            f"self.log({name!r}, ...) was given a {type(value).__name__}. Only the last stage runs the step, so metric "
            "objects would wait for the others for ever. Log numbers or tensors of one element."
        )
    if isinstance(value, Tensor) and value.numel() != 1:
        raise PipelineError(
            f"self.log({name!r}, ...) was given a tensor of shape {tuple(value.shape)}. Log numbers or tensors of one "
            "element, such as its mean."
        )
    if arguments.get("reduce_fx", "mean") not in _REDUCTIONS:
        raise PipelineError(
            f"self.log({name!r}, reduce_fx={arguments['reduce_fx']!r}) is not possible in a pipeline. Choose one of "
            f"the words {', '.join(map(repr, _REDUCTIONS))}."
        )
    if arguments.get("sync_dist_group") is not None:
        raise PipelineError(
            f"self.log({name!r}, sync_dist_group=...) is not possible in a pipeline, where sync_dist=True reduces over "
            "the replicas. Leave sync_dist_group out."
        )


class LastStage:
    """Loss function of the last stage: DeepSpeed calls it with the outputs of each micro-batch.

    It runs a step of the module. `whole` says that this is the only stage, which has all parameters.
    """

    def __init__(self, module: LightningModule, chain: Chain, logs: SharedLogs, whole: bool) -> None:
        self._module, self._chain, self._logs, self._whole = module, chain, logs, whole
        self._parameters = dict(module.named_parameters())  # to list them in each micro-batch would take time

    def __call__(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return the loss of a micro-batch, or zero in an evaluation, where DeepSpeed needs no loss.

        Raises:
            PipelineError: the step did not take the outputs once for the given inputs, returned no loss, or froze or
                unfroze parameters.
        """
        return self._logs.run((micro.hook, *micro.arguments[1:]), outputs, lambda: self._step(outputs, micro))

    def _step(self, outputs: Any, micro: MicroBatch) -> Tensor:
        step = getattr(self._module, micro.hook)
        trained = self._trained()
        with self._logs.recording(micro.samples), self._chain.computed(micro, outputs), self._own_parameters_only():
            result = step(micro.batch, *micro.arguments)
        if micro.hook != "training_step":
            return torch.zeros((), device=self._module.device)
        names = zip(self._parameters, trained, self._trained(), strict=True)
        refuse_changes_in_step(self._module, [name for name, before, after in names if before != after])
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor):
            raise PipelineError(
                f"training_step returned {type(result).__name__} instead of a loss. In a pipeline every micro-batch "
                "needs one: return the loss, or a dictionary with it as 'loss'."
            )
        return loss

    def _trained(self) -> list[bool]:
        return [each.requires_grad for each in self._parameters.values()]

    @contextmanager
    def _own_parameters_only(self) -> Iterator[None]:
        """Refuse steps that go through all parameters: the last stage has a part of them.

        A step may take one, as `next(self.parameters()).device` does: only going on to a second one is refused.
        """
        every = self._module.named_parameters

        def named_parameters(_: LightningModule, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
            for first in every(*args, **kwargs):
                yield first
                raise PipelineError(
                    f"{type(self._module).__name__} goes through self.parameters() in its step, which runs on the last "
                    "stage, where other stages' parameters are not: a sum over all of them would be wrong. "
                    "weight_decay of the optimizer replaces a penalty on all weights; a penalty on one layer belongs "
                    "into that layer."
                )

        if self._whole:
            yield
            return
        # A method, as torch.compile asks for its function.
        self._module.named_parameters = MethodType(named_parameters, self._module)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._module.named_parameters
