"""Layers that a strategy may see twice, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tests.situations.modules import FEATURES, WIDTH, Block, Regression, Situation
from torch import Tensor, nn
from torch.nn import functional


class SharedLayer(Regression):
    """Each block ends in the same layer, a part of them all."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.Sequential(Block(FEATURES), shared), *(nn.Sequential(Block(), shared) for _ in "ab")]
        )

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"blocks.0.0.linear": "colwise_gather_output"}


class SharedNorm(Regression):
    """All blocks share a small normalisation."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(
            [nn.Sequential(Block(FEATURES), shared), *(nn.Sequential(Block(), shared) for _ in "ab")]
        )

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"blocks.0.0.linear": "colwise_gather_output"}


class SharedParameter(Regression):
    """Two blocks have the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].linear.weight = self.blocks[1].linear.weight


class SameBlock(Regression):
    """The same block twice in the chain."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[1]


class SecondName(Regression):
    """Reaches a block by another name as well, registered before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        blocks, head = self.blocks, self.head
        del self.blocks, self.head
        self.encoder = blocks[1]
        self.blocks, self.head = blocks, head

    def forward(self, states: Tensor) -> Tensor:
        return self.head(self.blocks[2](self.encoder(self.blocks[0](states))))


class InAList(Regression):
    """Keeps a block in a plain list too, and calls it from there."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [self.blocks[1]]

    def forward(self, states: Tensor) -> Tensor:
        return self.head(self.blocks[2](self.others[0](self.blocks[0](states))))


class BareParameters(Regression):
    """Parameters of its own, of a list, and of a block beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.gains = nn.ParameterList([nn.Parameter(torch.full((WIDTH,), 1 + each / 10)) for each in range(3)])

    def forward(self, states: Tensor) -> Tensor:
        for block, gain in zip(self.blocks, self.gains, strict=True):
            states = block(states) * gain + self.shift
        return self.head(states)


class ScalarParameter(Regression):
    """A parameter without a dimension, as CLIP's temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states) * self.temperature


class WeightOfABlock(Regression):
    """Uses the weight of a block without calling the block."""

    def forward(self, states: Tensor) -> Tensor:
        states = self.blocks[2](self.blocks[1](self.blocks[0](states)))
        return self.head(functional.linear(states, self.blocks[1].linear.weight))


class PartOfABlock(Regression):
    """Calls a layer inside of a block, not the block."""

    def forward(self, states: Tensor) -> Tensor:
        states = self.blocks[0](states)
        return self.head(self.blocks[2](torch.relu(self.blocks[1].linear(states))))


class PartAndBlock(Regression):
    """Calls a layer inside of a block first, then the block, then the layer again."""

    def forward(self, states: Tensor) -> Tensor:
        states = torch.relu(self.blocks[1].linear(self.blocks[0](states)))
        states = self.blocks[1].linear(self.blocks[1](states))
        return self.head(self.blocks[2](states))


class OtherMethod(Regression):
    """Calls another method of a block than forward."""

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def encode(self, states: Tensor) -> Tensor:
            return torch.tanh(self.linear(states))

        def forward(self, states: Tensor) -> Tensor:
            return self.encode(states)

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.Coder()

    def forward(self, states: Tensor) -> Tensor:
        return self.head(self.blocks[2](self.blocks[1].encode(self.blocks[0](states))))


class Unused(Regression):
    """Has a block that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = Block()

    def sharded_blocks(self) -> Iterable[nn.Module]:
        return [*self.blocks, self.unused]


class Nested(Regression):
    """Names a block and a block inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.Sequential(Block(), Block())

    def sharded_blocks(self) -> Iterable[nn.Module]:
        return [*self.blocks, *self.blocks[1]]


class Parametrized(Regression):
    """A weight that torch computes of others."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.blocks[1].linear)


class NoBlocks(Regression):
    """Says nothing about blocks."""

    sharded_blocks: Any = None


class LossOfALayer(Regression):
    """Its loss is a layer with a parameter, called in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.Linear(1, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(self.criterion(self(batch[0])), batch[0])


class CompiledBlocks(Regression):
    """Its blocks compile themselves, and the whole calls them."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="eager")


SITUATIONS: dict[str, Situation] = {
    "shared_layer": Situation(SharedLayer),
    "shared_norm": Situation(SharedNorm),
    "shared_parameter": Situation(SharedParameter),
    "same_block": Situation(SameBlock),
    "second_name": Situation(SecondName),
    "in_a_list": Situation(InAList),
    "bare_parameters": Situation(BareParameters),
    "scalar_parameter": Situation(ScalarParameter),
    "weight_of_a_block": Situation(WeightOfABlock),
    "part_of_a_block": Situation(PartOfABlock),
    "part_and_block": Situation(PartAndBlock),
    "other_method": Situation(OtherMethod),
    "unused": Situation(Unused),
    "nested": Situation(Nested),
    "parametrized": Situation(Parametrized),
    "no_blocks": Situation(NoBlocks),
    "loss_of_a_layer": Situation(LossOfALayer),
    "compiled_blocks": Situation(CompiledBlocks),
}
