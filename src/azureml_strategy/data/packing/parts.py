"""What becomes one packed set, and how the files and folders of a source are dealt to training and validation."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from azureml_strategy.data.packing.shards import PackError, Records
from azureml_strategy.data.packing.workers import Task
from azureml_strategy.data.skipped import first_names, is_no_data, warn
from azureml_strategy.data.tar_index import split_of

# Folders that may be the validation set, in the order of preference.
_VALIDATION = ("val", "validation", "valid", "test")


class Part(ABC):
    """What becomes one packed set: the whole source, or its training or validation split.

    Attributes:
        digest: hash of what the source holds. It differs if a file was changed, added or removed.
        count: number of samples of the tasks, for their progress; 0 where there are no tasks.
    """

    digest: str
    count: int = 0

    def tasks(self, work: Path) -> Sequence[Task]:
        """Return what has to be done before `records`, in any order."""
        return ()

    @abstractmethod
    def examples(self) -> Iterator[bytes]:
        """Return some of what the source holds, quickly."""

    @abstractmethod
    def records(self, work: Path, workers: int) -> Records:
        """Return the samples. `work` is a folder for what they need while they are packed."""


def split_folders(source: Path) -> dict[str, Path]:
    """Return the folders of training and validation below a folder; nothing if it has no `train`."""
    if not (source / "train").is_dir():
        return {}
    validation = next((source / name for name in _VALIDATION if (source / name).is_dir()), None)
    packed = {"train": source / "train"} | ({} if validation is None else {"val": validation})
    names = {each.name for each in packed.values()}
    with os.scandir(source) as entries:
        others = sorted(entry.name for entry in entries if entry.is_dir() and not is_no_data(entry.name))
    _warn_of_others(source, names, [f"{name}/" for name in others if name not in names])
    return packed


def by_split(names: Iterable[str], source: Path) -> dict[str, list[str]]:
    """Sort files into training and validation by the words in their names; all are one set if none has such a word.

    Raises:
        PackError: some have such a word and others none; or there are several splits, and none is for training.
    """
    found: dict[str | None, list[str]] = {}
    for name in names:
        found.setdefault(split_of(name), []).append(name)
    if None in found and len(found) > 1:
        raise PackError(
            f"In {source}, {found[None][0]} does not say whether it is for training, as others do by `train` or `val` "
            "in their names. Move it to another folder, or rename it."
        )
    if "train" not in found and len(found) > 1:
        raise PackError(
            f"{source} holds files of {' and '.join(sorted(filter(None, found)))}, by their names, and none of train: "
            "they would become one set. Move each split into a folder of its own, and pack one by one: "
            f"azureml-strategy data pack {source}/val OUT/val; or add the files of train."
        )
    if "train" not in found:  # one split only, whichever
        return {"": [name for each in found.values() for name in each]}
    validation = next((name for name in ("val", "test") if name in found), None)
    packed = {"train": "train"} | ({} if validation is None else {"val": validation})
    others = [name for split, own in found.items() if split not in packed.values() for name in own]
    _warn_of_others(source, packed.values(), others)
    return {part: found[split] for part, split in packed.items()}


def _warn_of_others(source: Path, packed: Iterable[str], others: Sequence[str]) -> None:
    """Warn of splits and folders that are not packed."""
    if others:
        warn(
            f"{source}: {' and '.join(sorted(packed))} are packed, and not {first_names(others)} ({len(others):,}). A "
            "packed set has one part for training and one for validation: pack others by a command of their own."
        )
