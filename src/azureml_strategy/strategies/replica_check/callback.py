"""The callback that compares what ranks must have alike, and says what differs."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from azureml_strategy.cluster.environ import REPLICA_CHECK_SWITCH
from azureml_strategy.cluster.isolation import isolated, not_isolated
from azureml_strategy.strategies.replica_check.data_check import ComparingCallback
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
# What a rank has: for each set of ranks that must agree, the values by kind and name.
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

# The ranks look after these steps, and then at each multiple of the last number. Local SGD has averaged after the later
# ones by default. A look takes two or three milliseconds: see benchmarks/replica_check.py.
_FIRST, _EVERY = (2, 128), 1024
# At most this many batches lie between two readings of the Trainer's step count. To read it takes longer than all else
# in most of the batches.
_PACE = 16
# The ranks look before a save if the last look is at least this many steps ago.
_BEFORE_SAVE = 128
# At most this many groups of equal ranks are asked for the names of what differs.
_MOST_GROUPS = 8
# Where each rank sees other parameters, at most this many ranks warn of those that do not train.
_MOST_WARNING_RANKS = 4
# How long rank 0 waits at the end for ranks that come a moment later.
_LAST_SECONDS, _PAUSE_SECONDS = 5.0, 0.005


class Look:
    """What this rank has at one moment.

    Args:
        name: the same on all ranks that look at this moment. No other look has it.
        copies: what this rank has.
        turn: see `Fingerprints`.
        batches: how many have been trained on.

    Attributes:
        prints: the hashes of the tensors.
    """

    def __init__(self, name: str, copies: Sequence[Copy], turn: int, batches: int) -> None:
        self.name, self.batches, self._copies = name, batches, copies
        self.prints = Fingerprints([each.value for each in copies if isinstance(each.value, Tensor)], turn)

    def report(self, before: Report | None, changing: bool) -> tuple[Report, Report]:
        """Return all values, and what is reported of them, see `_CHANGING`.

        Args:
            before: all values of an earlier look, after which the training has gone on; None at the first.
            changing: whether buffers may differ after a step that changes them.
        """
        prints = iter(self.prints.values())
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


def apart(digests_of: Mapping[int, str]) -> dict[str, list[list[int]]]:
    """Find sets of ranks that must agree and do not, each in groups of those that have reported the same hash."""
    groups: dict[str, dict[str, list[int]]] = {}
    for rank, text in sorted(digests_of.items()):
        for holders, digest in json.loads(text).items():
            groups.setdefault(holders, {}).setdefault(digest, []).append(rank)
    return {holders: list(each.values()) for holders, each in groups.items() if len(each) > 1}


def differences(
    groups: Sequence[list[int]], reports: Mapping[int, Mapping[str, str]]
) -> dict[tuple[str, tuple[tuple[int, ...], ...]], list[str]]:
    """Name the values that differ among ranks that must agree, by their kind and the groups of ranks with the same.

    Args:
        groups: ranks that have reported the same.
        reports: what the first rank of each group has reported, by kind and name; those of some groups may be missing.
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
    return found


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
            # A buffer that changes on this rank may rest on another. Then the hashes of the chunk cannot be compared.
            folded[name] = _CHANGING if _CHANGING in joined.values() else _digest(joined)
    return folded


def sentence(kind: str, ranks: Sequence[Sequence[int]], names: Sequence[str], step: int) -> str:
    """Return a warning of which ranks differ in what, what the likely reason is, and what to do.

    Args:
        kind: of the values.
        ranks: groups with the same values.
        names: of the values.
        step: the optimizer's, by which the difference was there.
    """
    what, why = _CAUSES[kind]
    first, *others = ranks
    these = "; ".join(f"rank {_ranks(each)}" for each in others)
    more = f" and {len(names) - _NAMES_SHOWN:,} more" if len(names) > _NAMES_SHOWN else ""
    return (
        f"Ranks must have the same {what}, but on {these} these are others than on rank {_ranks(first)}, as seen at "
        f"step {step}: {', '.join(names[:_NAMES_SHOWN])}{more}. {why}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:_RANKS_SHOWN])) + (" and others" if len(ranks) > _RANKS_SHOWN else "")


class ReplicaCheck(ComparingCallback):
    """Warns if ranks that must have the same parameters, buffers, learning rates or counters have not.

    It looks before the first step, after 2 and 128, at each 1,024, after the first epoch, before a save and at the
    end. A batch of more than two steps, by manual optimization, may put a look off by some batches. Each rank hashes
    some elements of its tensors on their device. When the device has computed the hashes, the rank leaves them in the
    rendezvous store. Rank 0 compares those that are there. It waits for other ranks at the end of training only.
    Nothing is added to the collectives of the training.

    The strategy says which ranks must agree (`SharesCopies`). Random states are not compared: ranks draw different
    numbers on purpose.

    After the first steps it warns of parameters that have a gradient and an optimizer and have not changed, see
    `UpdateWatch`. Under DeepSpeed each rank sees those of its stage or its slices, and the first few ranks that find
    some warn.
    """

    switch = REPLICA_CHECK_SWITCH

    @override
    def _reset(self) -> None:
        self._watch: UpdateWatch | None = None
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
        self._begin("replica_check")
        flat = isinstance(trainer.strategy, FSDPStrategy)  # FSDP1, whose parameters have no gradients of their own
        self._watch = None if flat else UpdateWatch(trainer)
        if trainer.world_size > 1:
            self._lease(trainer)

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
            self._send_reports(trainer, wait=True)
            until = time.monotonic() + _LAST_SECONDS
            while self._uncompared and time.monotonic() < until:
                self._compare(trainer)
                time.sleep(_PAUSE_SECONDS if self._uncompared else 0)
        self._release()

    @isolated
    def _observe(self, watch: UpdateWatch, optimizer: Optimizer) -> None:
        watch.before_step(optimizer)
        self._next_visit = 0

    @isolated
    def _visit(self, trainer: Trainer) -> None:
        """Do what is due before a batch, and decide before which batch to come again."""
        if self._watch is not None and self._watch.has_news:
            self._notice_step(trainer, self._watch)
        if self._batches >= self._next_reading and self._is_due(trainer.global_step):
            self._look(trainer, "step")
        if self._channel is not None:
            self._send_reports(trainer, wait=False)
            if self._uncompared and self._batches >= self._next_comparison:  # other ranks may be a step behind
                self._compare(trainer)
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
        rank = trainer.global_rank
        if not sentences or self._channel is None or not isinstance(trainer.strategy, DeepSpeedStrategy):
            self._warn(trainer, sentences)
        elif self._ask(partial(_claim, name=f"{self._name}/speakers", rank=rank)):
            for each in sentences:
                log.warning("%s So says rank %d of what it keeps. If it is meant, set %s=off.", each, rank, self.switch)

    def _warn(self, trainer: Trainer, sentences: list[str]) -> None:
        for each in sentences:
            if trainer.is_global_zero:
                log.warning("%s If it is meant, set %s=off.", each, self.switch)

    def _is_due(self, step: int) -> bool:
        """Whether the ranks look after this step. A training need not begin at step 0, but all ranks count alike."""
        if self._first_step < 0:
            self._first_step = self._due = step
        is_due = step >= self._due
        if is_due:
            first = [self._first_step + each for each in _FIRST if self._first_step + each > step]
            self._due = min([*first, (step // _EVERY + 1) * _EVERY])
        # Read again after half the way, in case a batch has two steps. All ranks must decide alike here.
        self._next_reading = self._batches + min(max((self._due - step) // 2, 1), _PACE)
        return is_due and step != self._last_step

    def _look(self, trainer: Trainer, why: str) -> None:
        if self._channel is None:
            return
        step = trainer.global_step
        name = f"{self._name}/{why}/{step}"
        self._last_step, self._last_batch = step, self._batches
        self._next_visit, self._next_comparison = 0, self._batches + 1
        # Two looks after each other read the same elements, so that they show whether a buffer has changed.
        self._unreported.append(Look(name, copies_of(trainer), step // (2 * _EVERY), self._batches))

    def _send_reports(self, trainer: Trainer, wait: bool) -> None:
        """Leave the looks in the store whose hashes the device has computed."""
        while self._unreported and (wait or self._unreported[0].prints.are_ready()):
            look = self._unreported.pop(0)
            before = [values for batches, values in self._last_values if batches < look.batches]
            values, report = look.report(before[-1] if before else None, equalizes_buffers(trainer.strategy))
            self._last_values = [*self._last_values[-1:], (look.batches, values)]
            key = f"{look.name}/{trainer.global_rank}"
            self._reported.append(key)
            old = self._reported.pop(0) if len(self._reported) > 4 else None
            self._ask(partial(_send, key=key, report=report, old=old))
            if trainer.is_global_zero:
                self._uncompared = [*self._uncompared[-3:], look.name]

    def _compare(self, trainer: Trainer) -> None:
        """Compare the looks that all ranks have reported. Only rank 0 has any to compare."""
        for name in list(self._uncompared):
            keys = [f"{name}/{rank}" for rank in range(trainer.world_size)]
            found = self._ask(partial(_all_or_none, keys=keys))
            if found is None:
                continue
            self._uncompared.remove(name)
            for holders, groups in apart(dict(enumerate(found))).items():
                asked = [group[0] for group in groups[:_MOST_GROUPS]]
                of_asked = [f"{name}/{rank}/all" for rank in asked]
                texts = self._ask(partial(_all_or_none, keys=of_asked))
                reports = {rank: json.loads(text)[holders] for rank, text in zip(asked, texts or [], strict=False)}
                for (kind, ranks), names in differences(groups, reports).items():
                    if kind not in self._warned_of:
                        self._warned_of.add(kind)
                        self._warn(trainer, [sentence(kind, ranks, names, self._last_step)])


def _send(store: Any, key: str, report: Report, old: str | None) -> None:
    store.set(f"{key}/all", json.dumps(report))
    store.set(key, json.dumps({holders: _digest(values) for holders, values in report.items()}))
    if old is not None:
        store.delete_key(old)
        store.delete_key(f"{old}/all")


def _all_or_none(store: Any, keys: list[str]) -> list[str] | None:
    return [each.decode() for each in store.multi_get(keys)] if store.check(keys) else None


def _claim(store: Any, name: str, rank: int) -> bool:
    """Whether this rank is among the first that ask. To ask again changes nothing."""
    value = str(rank)
    keys = (f"{name}/{place}" for place in range(_MOST_WARNING_RANKS))
    return any(store.compare_set(key, "", value) == value.encode() for key in keys)
