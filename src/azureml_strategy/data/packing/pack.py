"""Packs a data set into tar shards and an index. A packing that was killed goes on where it was."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from azureml_strategy.data.packing.images import ImageRecords
from azureml_strategy.data.packing.parts import Part
from azureml_strategy.data.packing.shards import (
    SAMPLE_OVERHEAD,
    PackError,
    Records,
    ShardTask,
    atomic_write,
    join_shards,
)
from azureml_strategy.data.packing.workers import Meter, run_tasks
from azureml_strategy.data.shard_index import INDEX_NAME, ShardIndex, load_index
from azureml_strategy.data.tar_index import CLASSES_NAME

WORK_NAME = ".pack"
# Version of what is written. A packing that another version began cannot be continued.
_VERSION = 1
_NAMED = 5
_AGAIN = "Run the same command again then: it goes on where it was."


@dataclass(frozen=True)
class Packing:
    """What is packed to where, and how.

    Attributes:
        parts: the source, by the names of the folders in the packed set; `` is the folder of the set itself.
        out: the folder of the packed set.
        options: what decides on the content of the shards, as the user typed it: `{"--resize": 256}`. A packing that
            was interrupted goes on only with the same options.
        shard_size: bytes of a shard, about.
        seed: of the order of the samples, where they are shuffled.
        workers: processes.
        max_unreadable: how many samples may be left out because they cannot be read.
    """

    parts: Mapping[str, Part]
    out: Path
    options: Mapping[str, Any]
    shard_size: int = 100_000_000
    seed: int = 0
    workers: int = 1
    max_unreadable: int = 0

    def plan(self) -> dict[str, Any]:
        """Return what may not change between two runs of a packing."""
        options = {**self.options, "--shard-size": self.shard_size, "--seed": self.seed}
        return {
            "version": _VERSION,
            "options": options,
            "source": {name: part.digest for name, part in self.parts.items()},
        }

    def digest(self) -> str:
        """Hash of the plan, which the index records."""
        return hashlib.sha256(json.dumps(self.plan(), sort_keys=True).encode()).hexdigest()[:16]


def pack(packing: Packing) -> dict[str, ShardIndex]:
    """Pack a data set.

    The samples are dealt to shards by their order alone, and each shard is written by itself: so the result is the
    same, byte for byte, for any number of processes and however often the packing was interrupted.

    Returns:
        The indexes of the packed sets, by the names of their folders.

    Raises:
        PackError: the folder holds something else, too many samples cannot be read, or the disk is full. What is packed
            stays, and the same call goes on with it.
    """
    with _os_errors_as_pack_errors(packing.out):
        finished = _finished(packing)
        if finished:
            return finished
        work = _begin(packing)
        with _locked(work):
            folders = {name: work / (name or "all") for name in packing.parts}
            for name, folder in folders.items():
                _prepare(packing, name, folder)
            found = {name: part.records(folders[name], packing.workers) for name, part in packing.parts.items()}
            records = _agree_on_classes(found)
            tasks = {name: _deal(name, each, packing, folders[name]) for name, each in records.items()}
            unreadable = _write_shards(packing, records, tasks)
            indexes = {
                name: _write_index(packing, name, records[name], tasks[name], unreadable[name]) for name in tasks
            }
            shutil.rmtree(work)
        return indexes


def _finished(packing: Packing) -> dict[str, ShardIndex]:
    """Return the indexes if all of this is packed already, else nothing."""
    paths = {name: packing.out / name / INDEX_NAME for name in packing.parts}
    if not all(path.is_file() for path in paths.values()):
        return {}
    indexes = {name: load_index(path) for name, path in paths.items()}
    if any(index.facts.get("packing") != packing.digest() for index in indexes.values()):
        raise PackError(
            f"{packing.out} holds a packed set already, of other data or made with other options. Give another folder, "
            f"or remove it: rm -r {packing.out}"
        )
    if (packing.out / WORK_NAME).is_dir():
        shutil.rmtree(packing.out / WORK_NAME)
    return indexes


def _begin(packing: Packing) -> Path:
    """Return the work folder: make it, or check that the same packing has begun it."""
    work = packing.out / WORK_NAME
    plan = work / "plan.json"
    if plan.is_file():
        _require_same_plan(json.loads(plan.read_text()), json.loads(json.dumps(packing.plan())), packing.out)
        return work
    others = [path.name for path in packing.out.iterdir() if path.name != WORK_NAME] if packing.out.is_dir() else []
    if others:
        raise PackError(
            f"{packing.out} is not empty: it holds {', '.join(sorted(others)[:3])}. Give a folder that does not exist "
            "yet."
        )
    work.mkdir(parents=True, exist_ok=True)
    with atomic_write(plan) as file:
        file.write(json.dumps(packing.plan(), indent=1).encode())
    return work


def _require_same_plan(begun: dict[str, Any], now: dict[str, Any], out: Path) -> None:
    if begun == now:
        return
    anew = f"Finish it as it was begun, or begin anew: rm -r {out}"
    if begun["version"] != now["version"]:
        raise PackError(f"{out} is half packed by another version of azureml-strategy. {anew}")
    names = sorted(begun["options"].keys() | now["options"].keys())
    changed = [name for name in names if begun["options"].get(name) != now["options"].get(name)]
    if changed:
        was = ", ".join(f"{name} {begun['options'].get(name)}" for name in changed)
        today = ", ".join(f"{name} {now['options'].get(name)}" for name in changed)
        raise PackError(f"{out} is half packed with {was}, and now it is {today}. {anew}")
    raise PackError(
        f"{out} is half packed, and the source has changed since: a file was added, removed or written. A set of both "
        f"states would be neither. Begin anew: rm -r {out}"
    )


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    with (work / "lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PackError(f"Another process is packing to {work.parent} now. Wait for it, or end it.") from error
        yield


@contextmanager
def _os_errors_as_pack_errors(out: Path) -> Iterator[None]:
    """Raise errors of the operating system as a `PackError`, whose message says how to go on."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PackError(f"The disk of {out} is full. What is packed stays there. Make room. {_AGAIN}") from error
        if error.errno is None:
            raise
        raise PackError(
            f"{error.filename or out}: {error.strerror}. What is packed stays in {out}. {_AGAIN}"
        ) from error


def _prepare(packing: Packing, name: str, folder: Path) -> None:
    """Make the folders of a part, remove what a killed process left incomplete, and run the part's tasks."""
    target, part = packing.out / name, packing.parts[name]
    folder.mkdir(exist_ok=True)
    target.mkdir(exist_ok=True)
    files = (*folder.iterdir(), *folder.glob("unpacked/*"), *folder.glob("tokens/*"))
    incomplete = [path for path in files if path.name.startswith(".")]
    incomplete += [path for path in folder.glob("[!.]*.tar.*") if path.suffix != ".npz"]
    incomplete += [path for each in (INDEX_NAME, CLASSES_NAME) for path in target.glob(f".{each}.*")]
    for path in incomplete:
        # Its process may still be ending, and remove it itself.
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    tasks = [task for task in part.tasks(folder) if not task.is_done()]
    if tasks:
        for _ in run_tasks(tasks, packing.workers, Meter(f"Unpacking {name}".strip(), part.count)):
            pass


def _agree_on_classes(records: dict[str, Records]) -> dict[str, Records]:
    """Give the parts the same classes, where tars name none and a class is missing in one of them."""
    longest = max((each.classes for each in records.values()), key=len)
    for name, each in records.items():
        if each.classes != longest[: len(each.classes)]:
            raise PackError(
                f"The classes of {name} are not those of the other part: {', '.join(each.classes[:3])}, ... and "
                f"{', '.join(longest[:3])}, ... Give both the same classes in the same order."
            )
    return {
        name: replace(each, classes=longest) if isinstance(each, ImageRecords) else each
        for name, each in records.items()
    }


def _deal(part: str, records: Records, packing: Packing, work: Path) -> list[ShardTask]:
    """Deal the samples to shards: runs of equal length of one order, which is shuffled for images."""
    order = work / "order.npy"
    count = work / "shards.json"
    if not count.is_file():
        samples = len(records)
        numbers = np.random.default_rng(packing.seed).permutation(samples) if records.shuffled else np.arange(samples)
        total = (records.mean_bytes(numbers) + SAMPLE_OVERHEAD) * samples
        with atomic_write(order) as file:
            np.save(file, numbers)
        with atomic_write(count) as file:
            file.write(json.dumps(min(samples, max(1, round(total / packing.shard_size)))).encode())
    shards, samples = int(json.loads(count.read_text())), len(records)
    ends = [samples * number // shards for number in range(shards + 1)]
    targets = [packing.out / part / f"{part or 'shard'}-{number:06}.tar" for number in range(shards)]
    return [
        ShardTask(records, order, start, stop, target, work)
        for target, (start, stop) in zip(targets, pairwise(ends), strict=True)
    ]


def _write_shards(
    packing: Packing, records: Mapping[str, Records], tasks: Mapping[str, list[ShardTask]]
) -> dict[str, list[str]]:
    """Write the shards that are not done yet, and return what could not be read, by part."""
    unreadable: dict[str, list[str]] = {part: [] for part in tasks}
    parts = {task.target: part for part, own in tasks.items() for task in own}
    noun, total = next(iter(records.values())).noun, sum(map(len, records.values()))
    left, done = [], 0
    for task in chain(*tasks.values()):
        if task.is_done():
            done += task.stop - task.start
            unreadable[parts[task.target]] += task.read().unreadable
        else:
            left.append(task)
    _check_unreadable(packing, unreadable, noun, total)
    for task in run_tasks(left, packing.workers, Meter(f"Packing {noun}", total, done)):
        unreadable[parts[task.target]] += task.read().unreadable
        _check_unreadable(packing, unreadable, noun, total)
    return {part: sorted(names) for part, names in unreadable.items()}


def _check_unreadable(packing: Packing, unreadable: Mapping[str, list[str]], noun: str, total: int) -> None:
    found = [os.path.join(part, name) for part, names in unreadable.items() for name in names]
    if len(found) > packing.max_unreadable:
        raise PackError(
            f"{len(found)} of {total:,} {noun} cannot be read so far, and --max-unreadable is "
            f"{packing.max_unreadable}: {', '.join(sorted(found)[:_NAMED])}. Leave them out by --max-unreadable "
            f"{max(100, 2 * len(found))}, and the packing goes on where it was; or repair them and begin anew: "
            f"rm -r {packing.out}"
        )


def _write_index(
    packing: Packing, part: str, records: Records, tasks: Sequence[ShardTask], unreadable: list[str]
) -> ShardIndex:
    facts = records.facts() | {"packing": packing.digest()} | ({"unreadable": unreadable} if unreadable else {})
    packed = [task.read() for task in tasks]
    if not any(len(each.offset) for each in packed):
        raise PackError(f"None of the {records.noun} of {part or 'the source'} can be read.")
    index = join_shards(packed, records, facts)
    folder = packing.out / part
    if index.classes:
        with atomic_write(folder / CLASSES_NAME) as file:
            file.write("".join(f"{name}\n" for name in index.classes).encode())
    index.save(folder / INDEX_NAME)
    return index
