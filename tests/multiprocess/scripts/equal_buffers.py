"""Buffers that modules change in unusual ways, on ranks that see other numbers."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from common import report
from torch import Tensor, nn

from azureml_strategy.strategies.equal_buffers import EqualBuffers

RANK = int(os.environ["RANK"])
STEPS = 9
CPU = torch.device("cpu")


class Odd(nn.Module):
    """Each buffer changes in a way of its own, to numbers of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("constant", torch.randn(3))
        self.register_buffer("phases", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("conjugates", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("absent", None)
        self.register_buffer("by_data", torch.zeros(2))
        self.register_buffer("by_function", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("late", torch.zeros(2))
        self.register_buffer("grows", torch.zeros(1))
        self.register_buffer("not_a_number", torch.full((2,), torch.nan))
        self.register_buffer("chosen", torch.tensor([1.0, 1.0, 0.0, 0.0]))  # as a mask that is drawn anew
        self.register_buffer("order", torch.arange(6))
        self.register_buffer("beside_infinity", torch.tensor([-torch.inf, torch.nan, 0.0]))
        self.norm = nn.BatchNorm1d(2)

    def change(self, step: int) -> None:
        mine = torch.tensor([RANK + 1.0, step])
        self.by_data.data.add_(mine)
        nn.functional.batch_norm(torch.randn(4, 2) + RANK, self.by_function, torch.ones(2), training=True)
        self.replaced = self.replaced + mine
        self.count += RANK + 1
        self.chosen.copy_(self.chosen.roll(1 + RANK))  # no sum of these changes
        self.order.copy_(self.order[torch.tensor([1, 2, 0, 3, 4, 5] if RANK else [0, 2, 1, 3, 4, 5])])
        self.beside_infinity[2] += RANK + 1
        if step > 5:
            self.late.add_(mine)
        self.grows = torch.full((1 + RANK + step,), float(RANK))
        self.norm(torch.randn(4, 2) + RANK)


def values(module: nn.Module) -> dict[str, Any]:
    return {name: str(buffer.tolist()) for name, buffer in module.named_buffers()}


def by_steps() -> dict[str, Any]:
    torch.manual_seed(RANK)
    module = Odd()
    equal = EqualBuffers(module, CPU)
    equal.begin()
    found = {"begun": values(module)}
    for step in range(STEPS):
        equal.before_step()
        found[f"step_{step}"] = values(module)
        module.change(step)
    equal.before_use()
    return found | {"used": values(module)}


def counted() -> dict[str, int]:
    """How often a module of constants is sent, that a checkpoint has restored after the beginning."""
    module = Odd()
    equal = EqualBuffers(module, CPU)
    equal.begin()
    module.load_state_dict({name: buffer + 1 for name, buffer in module.state_dict().items() if name != "mask"}, False)
    calls = {"broadcast": 0}
    broadcast = dist.broadcast

    def count(*arguments: Any, **named: Any) -> Any:
        calls["broadcast"] += 1
        return broadcast(*arguments, **named)

    dist.broadcast = count
    try:
        for _ in range(STEPS):
            equal.before_step()
    finally:
        dist.broadcast = broadcast
    return calls


def after_inference() -> str:
    """A buffer that an evaluation has put there can be changed by nobody else but in inference mode."""
    module = Odd()
    equal = EqualBuffers(module, CPU)
    equal.begin()
    equal.before_step()
    with torch.inference_mode():
        made: Tensor = torch.tensor([1.0, RANK])
    module.late = made
    equal.before_step()
    return str(module.late.tolist())


dist.init_process_group("gloo")
report(RANK, by_steps=by_steps(), counted=counted(), after_inference=after_inference())
dist.destroy_process_group()
