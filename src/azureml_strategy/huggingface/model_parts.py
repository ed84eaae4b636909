"""Runs the parts of a transformers model one at a time, each by the model's own forward.

A partial model is a shallow copy of the model that has only one part. It has no other blocks, its other parts return
what they are given, and it gets the hidden states of the part before as `inputs_embeds`. So no forward is written
again, and masks and rotary embeddings are the model's own: each block computes them again from the attention mask and
positions.

`check` compares: the parts together must compute what the whole model computes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from typing_extensions import override

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PartRunner:
    """Runs the parts of a model without a head, such as LlamaModel.

    Args:
        base: the model.
        plan: the names of its parts in the order they run in; one of them is the list of blocks. The first one is the
            embedding of tokens. The outputs of further ones before the blocks are added to it; those without weights,
            such as a dropout, run with the one before them.
        has_weights: whether a part has weights, here or on another stage.

    Attributes:
        parts: the parts that run one at a time, by name, each with its kind: `embedding`, `block` or `norm`.

    Raises:
        LookupError: the model has no such parts.
    """

    def __init__(self, base: PreTrainedModel, plan: Sequence[str], has_weights: Callable[[nn.Module], bool]) -> None:
        self._base = base
        children = dict(base.named_children())
        (self._blocks,) = (name for name in plan if isinstance(children[name], nn.ModuleList))
        at = plan.index(self._blocks)
        self._tokens, self._embedding = plan[0], _groups(plan[:at], children, has_weights)
        self.parts = dict.fromkeys(self._embedding, "embedding")
        layers = cast(nn.ModuleList, base.get_submodule(self._blocks))
        self.parts |= {f"{self._blocks}.{index}": "block" for index in range(len(layers))}
        self.parts |= dict.fromkeys(plan[at + 1 :], "norm")
        added = self._embedding.keys() - {self._tokens}
        self._neutral = {name: _Zero() if name in added else nn.Identity() for name in plan}

    def run(self, part: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the hidden states after a part whose weights are in this process.

        Args:
            part: its name.
            inputs: `input_ids`, in whose place parts behind the embedding of tokens get hidden states;
                `attention_mask` and `position_ids` where the batch has them.
        """
        owner, _, index = part.rpartition(".")
        if owner == self._blocks:
            block = self._base.get_submodule(part)
            return self._states(self._partial_model({}, {int(index): block}), inputs)
        real = {name: self._base.get_submodule(name) for name in self._embedding.get(part, [part])}
        return self._states(self._partial_model(real, {}), inputs, embedded=part != self._tokens)

    def output(self, inputs: Mapping[str, Tensor]) -> Any:
        """Return what the model returns when hidden states leave its last part."""
        return self._forward(self._partial_model({}, {}), inputs)

    def _states(self, partial: PreTrainedModel, inputs: Mapping[str, Tensor], embedded: bool = True) -> Tensor:
        states: Tensor = self._forward(partial, inputs, embedded).last_hidden_state
        return states

    def _forward(self, partial: PreTrainedModel, inputs: Mapping[str, Tensor], embedded: bool = True) -> Any:
        first = {"inputs_embeds": inputs["input_ids"], "input_ids": None} if embedded else {}
        # The forward of the class: while a step runs, the model itself may have another one.
        return type(partial).forward(partial, **{**inputs, **first}, use_cache=False)

    def _partial_model(
        self, parts: Mapping[str, nn.Module], blocks: Mapping[int, nn.Module], window: int | None = None
    ) -> PreTrainedModel:
        """Return a copy of the model with these parts (by name) and blocks (by index) alone.

        `window` replaces the length of a sliding window.
        """
        partial = copy.copy(self._base)
        children = {**self._neutral, self._blocks: nn.ModuleList(blocks.values()), **parts}
        vars(partial)["_modules"] = {**dict(self._base.named_children()), **children}
        config = partial.config = copy.copy(self._base.config)
        config.num_hidden_layers = len(blocks)
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = [config.layer_types[index] for index in blocks]
        if window is not None and isinstance(getattr(config, "sliding_window", None), int):
            config.sliding_window = window
        return partial

    def check(self) -> bool:
        """Return whether the partial models together compute what the whole model computes.

        The whole forward runs with blocks that only record their arguments and return prepared states. Each block's
        partial model must give its block the same arguments, and nothing else may change the states on their way. The
        blocks must be in this process; their weights are not used.
        """
        inputs, states = self._samples()
        numbers = range(len(states) - 1)
        blocks = cast(nn.ModuleList, self._base.get_submodule(self._blocks))
        calls: list[Any] = []
        recording = {each: _replaced(blocks[each], _recording(calls, states[each + 1])) for each in numbers}
        tokens = {self._tokens: _replaced(nn.Identity(), _recording([], states[0]))}
        with torch.no_grad():
            last = self._states(self._partial_model(tokens, recording, _WINDOW), inputs, embedded=False)
            of_whole, start = list(calls), self._states(self._partial_model(tokens, {}), inputs, embedded=False)
            calls.clear()
            for each in numbers:
                part = self._partial_model({}, {each: recording[each]}, _WINDOW)
                self._states(part, {**inputs, "input_ids": states[each]})
            unchanged = self._states(self._partial_model({}, {}), {**inputs, "input_ids": states[0]})
        pairs = [(last, states[-1]), (start, states[0]), (unchanged, states[0]), (of_whole, calls)]
        return all(_equal(one, other) for one, other in pairs)

    def _samples(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return two sequences of unequal lengths, and states before and after each block."""
        buffers = (each for each in self._base.buffers() if not each.is_meta)
        device = next((each.device for each in buffers), torch.device("cpu"))
        shape = (2, 2 * _WINDOW)
        mask = torch.ones(shape, dtype=torch.long)
        mask[1, -1] = 0
        generator = torch.Generator().manual_seed(0)
        count = sum(kind == "block" for kind in self.parts.values()) + 1
        width = self._base.config.hidden_size
        states = [torch.randn(*shape, width, generator=generator).to(device) for _ in range(count)]
        ids = torch.zeros(shape, dtype=torch.long)
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}, states


_WINDOW = 4  # tokens; the samples are longer, so that blocks with and without a sliding window get different masks


class _Zero(nn.Module):
    """Adds nothing. It replaces an embedding that another partial model adds."""

    @override
    def forward(self, *args: Any) -> Tensor:
        return torch.zeros(())  # without dimensions, so it changes neither dtype nor shape


def _recording(calls: list[Any], states: Tensor) -> Callable[..., Tensor]:
    """Return a forward that records its arguments and always returns the same."""

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        calls.append((args, kwargs))
        return states

    return forward


def _groups(
    names: Sequence[str], children: Mapping[str, nn.Module], has_weights: Callable[[nn.Module], bool]
) -> dict[str, list[str]]:
    """Return the names of each part with weights and of those without weights that follow it, by that of the first."""
    groups: dict[str, list[str]] = {names[0]: []}
    for name in names:
        if has_weights(children[name]):
            groups[name] = []
        list(groups.values())[-1].append(name)
    return groups


def _replaced(layer: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Return a copy of a layer with another forward. It is a copy because models read attributes of their blocks."""
    replaced = copy.copy(layer)
    replaced.forward = forward
    return replaced


def _equal(one: Any, other: Any) -> bool:
    def same(one: Any, other: Any) -> bool:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return one.dtype == other.dtype and torch.equal(one, other)
        return bool(one == other)

    (mine, structure), (theirs, others) = tree_flatten(one), tree_flatten(other)
    return structure == others and all(map(same, mine, theirs))
