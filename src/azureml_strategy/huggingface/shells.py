"""Runs the parts of a transformers model one at a time, each by the model's own forward.

A shell is a shallow copy of the model that has one part alone: the other blocks are missing, other parts hand on what
they are given, and the hidden states of the part before come in as `inputs_embeds`. So no forward is written again, and
masks and rotary embeddings are the model's own: each block computes them again from the attention mask and positions.

`check` shows that the parts together do what the whole model does.
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


class Shells:
    """The parts of a model without a head, such as LlamaModel.

    Args:
        base: the model.
        plan: the names of its parts in the order they run in; one of them is the list of blocks. The first one is the
            embedding of tokens. Further ones before the blocks are added to it; those without weights, such as a
            dropout, run with the one before them.
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
        self.parts |= {f"{self._blocks}.{index}": "block" for index in range(len(self._layers()))}
        self.parts |= dict.fromkeys(plan[at + 1 :], "norm")
        added = self._embedding.keys() - {self._tokens}
        self._neutral = {name: _Zero() if name in added else nn.Identity() for name in plan}

    def run(self, part: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the hidden states after a part.

        Args:
            part: its name; its weights are in this process.
            inputs: `input_ids` for the embedding of tokens, hidden states in their place for every other part;
                `attention_mask` and `position_ids` where the batch has them.
        """
        owner, _, index = part.rpartition(".")
        if owner == self._blocks:
            block = self._base.get_submodule(part)
            return self._states(self._shell({}, {int(index): block}), inputs)
        real = {name: self._base.get_submodule(name) for name in self._embedding.get(part, [part])}
        return self._states(self._shell(real, {}), inputs, embedded=part != self._tokens)

    def output(self, inputs: Mapping[str, Tensor]) -> Any:
        """Return what the model returns when hidden states leave its last part."""
        return self._forward(self._shell({}, {}), inputs)

    def _layers(self) -> nn.ModuleList:
        return cast(nn.ModuleList, self._base.get_submodule(self._blocks))

    def _states(self, shell: PreTrainedModel, inputs: Mapping[str, Tensor], embedded: bool = True) -> Tensor:
        states: Tensor = self._forward(shell, inputs, embedded).last_hidden_state
        return states

    def _forward(self, shell: PreTrainedModel, inputs: Mapping[str, Tensor], embedded: bool = True) -> Any:
        first = {"inputs_embeds": inputs["input_ids"], "input_ids": None} if embedded else {}
        # of the class: the model itself may have another one while a step runs
        return type(shell).forward(shell, **{**inputs, **first}, use_cache=False)

    def _shell(
        self, parts: Mapping[str, nn.Module], blocks: Mapping[int, nn.Module], window: int | None = None
    ) -> PreTrainedModel:
        """Return a copy of the model with these parts and blocks alone.

        Args:
            parts: by name.
            blocks: by their index in the model.
            window: replaces the length of a sliding window.
        """
        shell = copy.copy(self._base)
        children = {**self._neutral, self._blocks: nn.ModuleList(blocks.values()), **parts}
        vars(shell)["_modules"] = {**dict(self._base.named_children()), **children}
        shell.config = self._config(list(blocks), window)
        return shell

    def _config(self, blocks: Sequence[int], window: int | None) -> Any:
        config = copy.copy(self._base.config)
        config.num_hidden_layers = len(blocks)
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = [config.layer_types[index] for index in blocks]
        if window is not None and isinstance(getattr(config, "sliding_window", None), int):
            config.sliding_window = window
        return config

    def check(self) -> bool:
        """Return whether the shells of all parts together do what the whole model does.

        The whole forward runs with blocks that only note what they are given and return states of their own. Each
        block's shell must give its block the same, and nothing else may change the states on their way. The blocks
        must be in this process; their weights are not used.
        """
        with torch.no_grad():
            return self._agree(*self._samples())

    def _agree(self, inputs: Mapping[str, Tensor], states: Sequence[Tensor]) -> bool:
        numbers = range(len(states) - 1)
        blocks = self._layers()
        seen: list[Any] = []
        noting = {each: _replaced(blocks[each], _Notes(seen, states[each + 1])) for each in numbers}
        tokens = {self._tokens: _replaced(nn.Identity(), _Notes([], states[0]))}
        last = self._states(self._shell(tokens, noting, _WINDOW), inputs, embedded=False)
        whole, start = list(seen), self._states(self._shell(tokens, {}), inputs, embedded=False)
        seen.clear()
        for each in numbers:
            self._states(self._shell({}, {each: noting[each]}, _WINDOW), {**inputs, "input_ids": states[each]})
        unchanged = self._states(self._shell({}, {}), {**inputs, "input_ids": states[0]})
        pairs = [(last, states[-1]), (start, states[0]), (unchanged, states[0]), (whole, seen)]
        return all(_equal(one, other) for one, other in pairs)

    def _samples(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Two sequences of other lengths, and states before and after each block."""
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


_WINDOW = 4  # tokens; the samples are longer, so that blocks with and without a sliding window get other masks


class _Zero(nn.Module):
    """Adds nothing: stands for an embedding that another shell adds."""

    @override
    def forward(self, *args: Any) -> Tensor:
        return torch.zeros(())  # without dimensions, so it changes neither dtype nor shape


class _Notes:
    """A forward that notes its arguments and returns always the same."""

    def __init__(self, seen: list[Any], states: Tensor) -> None:
        self._seen, self._states = seen, states

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self._seen.append((args, kwargs))
        return self._states


def _groups(
    names: Sequence[str], children: Mapping[str, nn.Module], has_weights: Callable[[nn.Module], bool]
) -> dict[str, list[str]]:
    """Return each part with weights, and with it those without weights that follow."""
    groups: dict[str, list[str]] = {names[0]: []}
    for name in names:
        if has_weights(children[name]):
            groups[name] = []
        list(groups.values())[-1].append(name)
    return groups


def _replaced(layer: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Return a copy of a layer with another forward; models ask their blocks for attributes."""
    replaced = copy.copy(layer)
    replaced.forward = forward
    return replaced


def _equal(one: Any, other: Any) -> bool:
    (mine, structure), (theirs, others) = tree_flatten(one), tree_flatten(other)
    return structure == others and all(map(_same, mine, theirs))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)
