"""Checks whether ranks that should read different samples read the same ones."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DistributedSampler
from typing_extensions import override

from azureml_strategy.cluster.environ import DATA_CHECK_SWITCH
from azureml_strategy.cluster.isolation import IsolatedCallback
from azureml_strategy.control.channel import Channel, lease_channel

log = logging.getLogger(__name__)
T = TypeVar("T")

# A single batch may be equal by chance or on purpose: tiny data that wraps around, or a batch that is used repeatedly.
_BATCHES = 2
# About this many elements, spread over a tensor or array, are hashed: enough to distinguish batches, and little to copy
# from a GPU.
_MOST_ELEMENTS = 4096
# A batch may be any nest of containers. What lies deeper, or comes after so many leaves, does not count.
_DEEPEST, _MOST_LEAVES = 6, 256
_ANSWER_SECONDS = 10.0
# How many fits this process has begun, by check. All ranks count alike.
_fits: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


class ComparingCallback(IsolatedCallback):
    """Base of the checks in which ranks leave reports in the rendezvous store, and rank 0 compares them."""

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._give_back: Callable[[], None] | None = None
        self._name = ""  # the keys of this fit begin with it
        self._reset()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    @override
    def _give_up(self, trainer: Trainer | None) -> None:
        self._release()

    def _begin(self, check: str) -> None:
        self._release()
        # torchrun's store outlives the processes that it restarts
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._name = f"azureml_strategy/{check}/{attempt}/{next(_fits[check])}"

    def _lease(self, trainer: Trainer) -> None:
        """Lease the channel to the store, until `_release`. There may be none."""
        lease = lease_channel(trainer.world_size)
        if lease is not None:
            self._channel, self._give_back = lease

    def _ask(self, action: Callable[[Any], T]) -> T:
        """Make a call on the store."""
        assert self._channel is not None
        return self._channel.call(action, _ANSWER_SECONDS)

    def _release(self) -> None:
        give_back, self._give_back, self._channel = self._give_back, None, None
        self._reset()
        if give_back is not None:
            give_back()

    def _reset(self) -> None:
        """Forget what belongs to one fit."""


class DataCheck(ComparingCallback):
    """Warns once per fit if ranks train on the same samples, as with an IterableDataset that nothing has split.

    Lightning gives a map-style data set a DistributedSampler, but an iterable one nothing: each rank reads all of it,
    and N ranks learn what one would. Each rank hashes its first two training batches and leaves the hashes in the
    rendezvous store. Rank 0 compares the hashes that are there and waits for no other rank.

    Only ranks of different data-parallel replicas are compared. Nothing is compared with `overfit_batches`, if all
    loaders have a DistributedSampler, or if a rank's own two batches are equal. The check does not find ranks that read
    the same samples in another order.

    It waits for the GPU once, at the second batch.
    """

    switch = DATA_CHECK_SWITCH

    @override
    def _reset(self) -> None:
        self._batches: list[_Batch] | None = None  # None if they are not compared, or published already
        self._batches_since = 0  # the hashes were published

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _, replicas = _replica(trainer)
        self._begin("data_check")
        if replicas > 1 and not getattr(trainer, "overfit_batches", 0) and not _is_split(trainer):
            self._batches = []

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._batches is not None:
            self._batches.append(_Batch(batch))
            if len(self._batches) == _BATCHES:
                self._publish(trainer, _digests(self._batches))
                self._batches = None
        elif self._channel is not None:
            self._batches_since += 1
            # At powers of two: other ranks may be a step behind, or an hour.
            if self._batches_since & (self._batches_since - 1) == 0:
                self._compare(trainer, at_end=False)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._channel is not None:
            self._compare(trainer, at_end=True)
        self._release()

    def _publish(self, trainer: Trainer, digests: list[str]) -> None:
        """Write the hashes into the store for rank 0."""
        self._lease(trainer)
        if self._channel is None:
            return
        text = json.dumps({"replica": _replica(trainer)[0], "batches": digests})
        self._ask(lambda store: store.set(f"{self._name}/{trainer.global_rank}", text))
        if trainer.global_rank > 0:
            self._release()

    def _compare(self, trainer: Trainer, at_end: bool) -> None:
        keys = [f"{self._name}/{rank}" for rank in range(trainer.world_size)]
        found = self._ask(lambda store: {rank: store.get(key) for rank, key in enumerate(keys) if store.check([key])})
        if len(found) < trainer.world_size and not at_end:
            return
        published = {rank: json.loads(text) for rank, text in found.items()}
        self._release()
        for same in _same(published):
            log.warning(
                "Ranks %s train on the same samples: their first %d batches of %s are equal, so that they learn "
                "together what one of them would alone. Nothing splits an IterableDataset but its own __iter__: let "
                "replica r of n yield itertools.islice(samples, r, None, n), with r and n from "
                "trainer.distributed_sampler_kwargs. A map-style data set gets a DistributedSampler from Lightning, "
                "unless use_distributed_sampler=False. If it is meant, set %s=off.",
                ", ".join(map(str, same)),
                _BATCHES,
                _names(trainer),
                self.switch,
            )


class _Batch:
    """What identifies a batch: some bytes of each tensor, still on its device, and everything else as text."""

    def __init__(self, batch: Any) -> None:
        self.text: list[str] = []
        self.pieces: list[Tensor] = []
        for leaf in itertools.islice(_leaves(batch, 0), _MOST_LEAVES):
            if isinstance(leaf, Tensor):
                with contextlib.suppress(RuntimeError, TypeError):  # sparse or nested tensors, or of a subclass
                    self.text.append(f"{leaf.dtype} {tuple(leaf.shape)}")
                    self.pieces.append(_sample(leaf))
            else:
                self.text.append(str(leaf))


def _digests(batches: list[_Batch]) -> list[str]:
    """Hash each batch. The bytes of a device are copied to the host in one go."""
    devices = {piece.device for batch in batches for piece in batch.pieces}
    copied: dict[int, bytes] = {}
    for device in devices:
        pieces = [piece for batch in batches for piece in batch.pieces if piece.device == device]
        content = bytes(torch.cat(pieces).cpu().numpy())
        for piece in pieces:
            copied[id(piece)], content = content[: len(piece)], content[len(piece) :]
    contents = [
        b"".join([repr(batch.text).encode(), *(copied[id(piece)] for piece in batch.pieces)]) for batch in batches
    ]
    return [hashlib.sha256(content).hexdigest() for content in contents]


def _sample(tensor: Tensor) -> Tensor:
    """Take some elements of a tensor as bytes, uint8. It is a copy, as the training step may write into the batch."""
    if tensor.is_meta:
        raise TypeError("there is nothing in it")
    plain = tensor.detach()
    step = plain.numel() // _MOST_ELEMENTS | 1  # odd: an even one would see but some columns of most images
    if plain.is_contiguous():
        return plain.view(-1)[::step].clone().view(torch.uint8)
    # Flattening it would copy the batch.
    places = torch.arange(0, plain.numel(), step, device=plain.device)
    return plain[torch.unravel_index(places, plain.shape)].view(torch.uint8)


def _leaves(node: Any, depth: int) -> Iterator[Any]:
    """Yield the tensors in a batch's containers, and as text everything else that identifies the batch."""
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, (str, bytes, int, float, complex)) or node is None:
        yield repr(node)
    elif type(node).__module__ == "numpy":
        if node.dtype.kind in "biufc" and node.ndim:
            yield torch.from_numpy(node.copy())
        elif node.size <= _MOST_ELEMENTS:
            yield repr(node.tolist())
    elif depth < _DEEPEST:
        for child in _children(node):
            yield from _leaves(child, depth + 1)


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, Mapping):
        return (part for key, child in node.items() for part in (str(key), child))
    if isinstance(node, (list, tuple)):
        return node
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return (getattr(node, field.name) for field in dataclasses.fields(node))
    return list(getattr(node, "__dict__", {}).values())


def _same(published: Mapping[int, Mapping[str, Any]]) -> list[list[int]]:
    """Find groups of ranks with equal batches, one rank per replica. Skip ranks whose own batches are all equal."""
    by_batches: dict[tuple[str, ...], dict[int, int]] = {}
    for rank, each in sorted(published.items()):
        if len(set(each["batches"])) > 1:
            by_batches.setdefault(tuple(each["batches"]), {}).setdefault(each["replica"], rank)
    return [list(ranks.values()) for ranks in by_batches.values() if len(ranks) > 1]


def _replica(trainer: Trainer) -> tuple[int, int]:
    """Return this process's replica and the number of replicas."""
    arguments = trainer.distributed_sampler_kwargs
    return (arguments["rank"], arguments["num_replicas"]) if arguments else (0, 1)


def _is_split(trainer: Trainer) -> bool:
    """Tell whether every loader has a sampler that gives each replica its own samples."""
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    return all(
        isinstance(getattr(each, "sampler", None), DistributedSampler)
        or isinstance(getattr(getattr(each, "batch_sampler", None), "sampler", None), DistributedSampler)
        for each in loaders
    )


def _names(trainer: Trainer) -> str:
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    return ", ".join(dict.fromkeys(type(getattr(each, "dataset", each)).__name__ for each in loaders))
