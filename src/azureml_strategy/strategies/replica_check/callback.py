"""The callback that compares what ranks must have alike, and says what differs."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from azureml_strategy.cluster.environ import REPLICA_CHECK_SWITCH
from azureml_strategy.cluster.isolation import IsolatedCallback, isolated, not_isolated
from azureml_strategy.control.channel import Channel, lease_channel
from azureml_strategy.strategies.replica_check.fingerprints import (
    BUFFER,
    OPTIMIZER,
    PARAMETER,
    SCHEDULER,
    Copy,
    Fingerprints,
    copies_of,
    equalizes_buffers,
)
from azureml_strategy.strategies.replica_check.updates import UpdateWatch

log = logging.getLogger(__name__)


# Stands for the value of a buffer that the training has just changed, and the strategy makes equal before it is used.
_CHANGING = "changing"
# With more names, neighbours are reported as one, so that the report of each rank stays small.
_MOST_NAMES = 512
# holders: values by kind and name
Report = dict[str, dict[str, str]]
_NAMES_SHOWN, _RANKS_SHOWN = 5, 8
# kind: (what differs, why it is likely and what to do)
_CAUSES = {
    PARAMETER: (
        "parameters",
        "Something has changed them on some ranks alone, such as weights that a callback loads or edits on rank 0, or "
        "gradients that were not averaged. The ranks train different models, and a checkpoint has the one of rank 0. "
        "Do on all ranks what one of them does, before the training starts or in the same hook.",
    ),
    BUFFER: (
        "buffers",
        "Nothing makes them equal, so each rank computes with its own, and a checkpoint has those of rank 0. "
        "azureml_ddp, azureml_model_parallel and azureml_deepspeed keep buffers equal unless broadcast_buffers=False; "
        "or change them by what all ranks have, with torch.distributed.all_reduce.",
    ),
    OPTIMIZER: (
        "settings or counters of optimizers",
        "Ranks that step by other numbers soon have other parameters. Where a metric decides on them, log it for all "
        "ranks, self.log(name, value, sync_dist=True); where a callback or hook sets them, set them on all ranks.",
    ),
    SCHEDULER: (
        "states of schedulers",
        "Their learning rates come apart, and with them the parameters. A scheduler that follows a metric must follow "
        "the same on all ranks: self.log(name, value, sync_dist=True), also where you call scheduler.step(value).",
    ),
}

# After these steps, and then each so many. Local SGD has averaged after the later ones by default. A look takes two or
# three milliseconds: see benchmarks/replica_check.py.
_FIRST, _EVERY = (2, 128), 1024
# The Trainer's steps are read after so many batches at the latest: reading them takes longer than all else in most of
# the batches.
_PACE = 16
# A save is preceded by a look, unless the last one is not so many steps ago.
_BEFORE_SAVE = 128
# So many different ranks are asked for names at most.
_MOST_GROUPS = 8
# Where each rank sees other parameters, so many ranks may warn of those that do not train.
_MOST_WARNING_RANKS = 4
_ANSWER_SECONDS = 10.0
# How long rank 0 waits at the end for ranks that come a moment later.
_LAST_SECONDS, _PAUSE_SECONDS = 5.0, 0.005
# A process may fit several times. All ranks count alike.
_fits = itertools.count()


class Look:
    """What this rank has at one moment.

    Args:
        name: the same on all ranks that look at this moment, and of no other look.
        copies: what it has.
        turn: see `Fingerprints`.
        batches: how many have been trained on.
    """

    def __init__(self, name: str, copies: Sequence[Copy], turn: int, batches: int) -> None:
        self.name, self.batches, self._copies = name, batches, copies
        self._prints = Fingerprints([each.value for each in copies if isinstance(each.value, Tensor)], turn)

    def is_ready(self) -> bool:
        """Whether its values can be read without waiting."""
        return self._prints.are_ready()

    def report(self, before: Report | None, changing: bool) -> tuple[Report, Report]:
        """Return all values; and what is reported of them, see `_CHANGING`.

        Args:
            before: all values of a look before further training; None at the first.
            changing: whether buffers may differ after a step that changes them.
        """
        prints = iter(self._prints.values())
        values: Report = {}
        reported: Report = {}
        for each in self._copies:
            value = f"{next(prints) & (1 << 64) - 1:016x}" if isinstance(each.value, Tensor) else repr(each.value)
            key = f"{each.kind} {each.name}"
            values.setdefault(each.holders, {})[key] = value
            moved = before is not None and before.get(each.holders, {}).get(key) != value
            hidden = changing and each.kind == BUFFER and moved
            reported.setdefault(each.holders, {})[key] = _CHANGING if hidden else value
        return values, {holders: _folded(of_holders) for holders, of_holders in reported.items()}


@dataclass(frozen=True)
class Difference:
    """Ranks that must have a value alike, and have not.

    Attributes:
        kind: of the value.
        names: of the values that differ.
        ranks: groups of ranks; those of a group have reported the same.
    """

    kind: str
    names: list[str]
    ranks: list[list[int]]


def digests(report: Report) -> str:
    """Return one hash for each of the holders, which rank 0 compares first."""
    return json.dumps({holders: _digest(values) for holders, values in report.items()})


def apart(digests_of: Mapping[int, str]) -> dict[str, list[list[int]]]:
    """Find holders whose ranks have reported different digests, and the ranks that have reported the same."""
    groups: dict[str, dict[str, list[int]]] = {}
    for rank, text in sorted(digests_of.items()):
        for holders, digest in json.loads(text).items():
            groups.setdefault(holders, {}).setdefault(digest, []).append(rank)
    return {holders: list(each.values()) for holders, each in groups.items() if len(each) > 1}


def differences(groups: Sequence[list[int]], reports: Mapping[int, Mapping[str, str]]) -> list[Difference]:
    """Name what differs among ranks with the same holders.

    Args:
        groups: ranks that have reported the same.
        reports: what the first rank of each group has reported, by kind and name; some groups may be missing.
    """
    found: dict[tuple[str, tuple[tuple[int, ...], ...]], list[str]] = {}
    known = [group for group in groups if group[0] in reports]
    for key in dict.fromkeys(key for group in known for key in reports[group[0]]):
        by_value: dict[str, list[int]] = {}
        for group in known:
            value = reports[group[0]].get(key, _CHANGING)
            if value != _CHANGING:
                by_value.setdefault(value, []).extend(group)
        if len(by_value) > 1:
            kind, _, name = key.partition(" ")
            ranks = tuple(tuple(sorted(each)) for each in by_value.values())
            found.setdefault((kind, ranks), []).append(name)
    return [Difference(kind, names, [list(each) for each in ranks]) for (kind, ranks), names in found.items()]


def _digest(values: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]


def _folded(values: Mapping[str, str]) -> dict[str, str]:
    """Join neighbours of one kind under their first and last names, if there are too many."""
    if len(values) <= _MOST_NAMES:
        return dict(values)
    by_kind: dict[str, list[str]] = {}
    for key in values:
        by_kind.setdefault(key.partition(" ")[0], []).append(key)
    size = -(-len(values) // _MOST_NAMES) + 1
    folded = {}
    for keys in by_kind.values():
        for chunk in (keys[start : start + size] for start in range(0, len(keys), size)):
            name = chunk[0] if len(chunk) == 1 else f"{chunk[0]} to {chunk[-1].partition(' ')[2]}"
            joined = {str(i): values[key] for i, key in enumerate(chunk)}
            # What changes on one rank may rest on another, so that nothing can be said of the others beside it.
            folded[name] = _CHANGING if _CHANGING in joined.values() else _digest(joined)
    return folded


def sentence(difference: Difference, step: int) -> str:
    """Return a warning of which ranks differ in what, why that is likely, and what to do.

    Args:
        difference: what was found.
        step: of the optimizer, after which it was found at the latest.
    """
    what, why = _CAUSES[difference.kind]
    first, *others = difference.ranks
    these = "; ".join(f"rank {_ranks(each)}" for each in others)
    names = ", ".join(difference.names[:_NAMES_SHOWN])
    more = f" and {len(difference.names) - _NAMES_SHOWN:,} more" if len(difference.names) > _NAMES_SHOWN else ""
    return (
        f"Ranks must have the same {what}, but on {these} these are others than on rank {_ranks(first)}, "
        f"as seen at step {step}: "
        f"{names}{more}. {why}"
    )


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:_RANKS_SHOWN])) + (" and others" if len(ranks) > _RANKS_SHOWN else "")


class ReplicaCheck(IsolatedCallback):
    """Warns if ranks that must have the same parameters, buffers, learning rates or counters have not.

    It looks before the first step, after 2 and 128, at each 1,024, after the first epoch, before a save and at the
    end. A batch of more than two steps, by manual optimization, may put a look off by some batches. Each rank hashes
    some elements of its tensors where they lie, and leaves the hashes in the rendezvous store when the device has come
    so far. Rank 0 compares those that are there, and waits for no other rank but at the end of training. Nothing is
    added to the collectives of the training.

    Which ranks must agree, the strategy says (`SharesCopies`). Random states are not compared: ranks draw different
    numbers on purpose.

    After the first steps it warns of parameters that have a gradient and an optimizer and have not changed, see
    `UpdateWatch`. Under DeepSpeed each rank sees those of its stage or its slices, and the first few that find some
    say so.
    """

    switch = REPLICA_CHECK_SWITCH

    def __init__(self) -> None:
        self._give_back: Callable[[], None] = _nothing_to_give
        self._watch: UpdateWatch | None = None
        self._channel: Channel | None = None
        self._name = ""
        self._reset()

    def _reset(self) -> None:
        self._batches = self._last_batch = 0
        self._next_visit = self._next_reading = self._next_comparison = 0  # counted in batches
        self._first_step = self._last_step = -1
        self._due = 0  # the step after which the ranks look next
        self._saved = self._ended_epoch = False
        self._last_values: list[tuple[int, Report]] = []  # of the last looks, with the batches before them
        self._unreported: list[Look] = []
        self._uncompared: list[str] = []  # names of looks that rank 0 has still to compare
        self._reported: list[str] = []  # keys in the store
        self._warned_of: set[str] = set()  # kinds of differences

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._release()
        # torchrun's store outlives the processes that it restarts
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._name = f"azureml_strategy/replica_check/{attempt}/{next(_fits)}"
        self._watch = UpdateWatch.of(trainer)
        lease = lease_channel(trainer.world_size) if trainer.world_size > 1 else None
        if lease is not None:
            self._channel, self._give_back = lease

    @override
    @not_isolated
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._batches >= self._next_visit:
            self._visit(trainer)
        self._batches += 1

    @override
    @not_isolated
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._watch is not None and self._watch.is_due(optimizer):
            self._observe(self._watch, optimizer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._ended_epoch:
            # Before the next batch. If there is none, the look at the end sees the same.
            self._ended_epoch = True
            self._due = self._next_reading = self._next_visit = 0

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        first = not self._saved and trainer.global_step != self._last_step
        if first or trainer.global_step - self._last_step >= _BEFORE_SAVE:
            self._saved = True
            self._look(trainer, "save")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._watch is not None:
            self._notice_step(trainer, self._watch, at_end=True)
        self._look(trainer, "end")
        if self._channel is not None:
            self._send_reports(trainer, self._channel, wait=True)
            until = time.monotonic() + _LAST_SECONDS
            while self._uncompared and time.monotonic() < until:
                self._compare(trainer, self._channel)
                time.sleep(_PAUSE_SECONDS if self._uncompared else 0)
        self._release()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    @override
    def _give_up(self, trainer: Trainer | None) -> None:
        self._release()

    def _release(self) -> None:
        give_back, self._give_back = self._give_back, _nothing_to_give
        self._watch = self._channel = None
        self._reset()
        give_back()

    @isolated
    def _observe(self, watch: UpdateWatch, optimizer: Optimizer) -> None:
        watch.before_step(optimizer)
        self._next_visit = 0

    @isolated
    def _visit(self, trainer: Trainer) -> None:
        """Do what is due before a batch, and see before which one to come again."""
        if self._watch is not None and self._watch.has_news:
            self._notice_step(trainer, self._watch)
        if self._batches >= self._next_reading and self._is_due(trainer.global_step):
            self._look(trainer, "step")
        if self._channel is not None:
            self._send_reports(trainer, self._channel, wait=False)
            if self._uncompared and self._batches >= self._next_comparison:  # other ranks may be a step behind
                self._compare(trainer, self._channel)
                self._next_comparison = 2 * self._batches - self._last_batch
        visits = [self._next_reading]
        if self._uncompared:
            visits.append(self._next_comparison)
        if self._unreported or (self._watch is not None and self._watch.has_news):
            visits.append(self._batches + 1)
        self._next_visit = min(visits)

    def _notice_step(self, trainer: Trainer, watch: UpdateWatch, at_end: bool = False) -> None:
        watch.after_batch()
        sentences = watch.verdict(at_end)
        channel, rank = self._channel, trainer.global_rank
        if not sentences or channel is None or not isinstance(trainer.strategy, DeepSpeedStrategy):
            self._warn(trainer, sentences)
        elif channel.call(partial(_claim, name=f"{self._name}/speakers", rank=rank), _ANSWER_SECONDS):
            for each in sentences:
                log.warning("%s So says rank %d of what it keeps. If it is meant, set %s=off.", each, rank, self.switch)

    def _warn(self, trainer: Trainer, sentences: list[str]) -> None:
        for each in sentences:
            if trainer.is_global_zero:
                log.warning("%s If it is meant, set %s=off.", each, self.switch)

    def _is_due(self, step: int) -> bool:
        """Whether the ranks look after this step. They need not have begun at 0, but all of them count alike."""
        if self._first_step < 0:
            self._first_step = self._due = step
        is_due = step >= self._due
        if is_due:
            first = [self._first_step + each for each in _FIRST if self._first_step + each > step]
            self._due = min([*first, (step // _EVERY + 1) * _EVERY])
        # Half the way, in case a batch has two steps. What only this rank knows must not decide here.
        self._next_reading = self._batches + min(max((self._due - step) // 2, 1), _PACE)
        return is_due and step != self._last_step

    def _look(self, trainer: Trainer, why: str) -> None:
        if self._channel is None:
            return
        step = trainer.global_step
        name = f"{self._name}/{why}/{step}"
        self._last_step, self._last_batch = step, self._batches
        self._next_visit, self._next_comparison = 0, self._batches + 1
        # Pairs of looks read the same elements, so that a buffer can be seen to stay as it is.
        self._unreported.append(Look(name, copies_of(trainer), step // (2 * _EVERY), self._batches))

    def _send_reports(self, trainer: Trainer, channel: Channel, wait: bool) -> None:
        """Leave in the store what the device has finished."""
        while self._unreported and (wait or self._unreported[0].is_ready()):
            look = self._unreported.pop(0)
            before = [values for batches, values in self._last_values if batches < look.batches]
            values, report = look.report(before[-1] if before else None, equalizes_buffers(trainer.strategy))
            self._last_values = [*self._last_values[-1:], (look.batches, values)]
            own = f"{look.name}/{trainer.global_rank}"
            self._reported.append(own)
            old = self._reported.pop(0) if len(self._reported) > 4 else None
            channel.call(partial(_send, key=own, report=report, old=old), _ANSWER_SECONDS)
            if trainer.is_global_zero:
                self._uncompared = [*self._uncompared[-3:], look.name]

    def _compare(self, trainer: Trainer, channel: Channel) -> None:
        """Compare the looks that all ranks have reported; on rank 0."""
        for name in list(self._uncompared):
            keys = [f"{name}/{rank}" for rank in range(trainer.world_size)]
            found = channel.call(partial(_all_or_none, keys=keys), _ANSWER_SECONDS)
            if found is None:
                continue
            self._uncompared.remove(name)
            for holders, groups in apart(dict(enumerate(found))).items():
                asked = [group[0] for group in groups[:_MOST_GROUPS]]
                of_asked = [f"{name}/{rank}/all" for rank in asked]
                texts = channel.call(partial(_all_or_none, keys=of_asked), _ANSWER_SECONDS)
                reports = {rank: json.loads(text)[holders] for rank, text in zip(asked, texts or [], strict=False)}
                self._warn_of_differences(trainer, differences(groups, reports))

    def _warn_of_differences(self, trainer: Trainer, found: list[Difference]) -> None:
        for each in found:
            if each.kind not in self._warned_of:
                self._warned_of.add(each.kind)
                self._warn(trainer, [sentence(each, self._last_step)])


def _send(store: Any, key: str, report: Report, old: str | None) -> None:
    store.set(f"{key}/all", json.dumps(report))
    store.set(key, digests(report))
    if old is not None:
        store.delete_key(old)
        store.delete_key(f"{old}/all")


def _all_or_none(store: Any, keys: list[str]) -> list[str] | None:
    return [each.decode() for each in store.multi_get(keys)] if store.check(keys) else None


def _claim(store: Any, name: str, rank: int) -> bool:
    """Whether this rank is among the first that ask. Asking again changes nothing."""
    own = str(rank).encode()
    return any(store.compare_set(f"{name}/{place}", "", str(rank)) == own for place in range(_MOST_WARNING_RANKS))


def _nothing_to_give() -> None:
    """Stands for giving back a channel that was not leased."""
