"""The memory of a data loader's workers over the epochs of a set of 1.3 million packed images.

    python benchmarks/worker_memory.py

The set is made up: its index has 1.3 million samples, which share some thousand records, so that the files are small
and the arrays are those of ImageNet. Each epoch reads the same number of batches, and then each worker's own memory is
taken (what no other process shares). The peer keeps names and labels in lists of Python objects, as many data sets do:
each reference that a worker touches changes a counter, and so copies the page.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from harness import RESULTS, save, show
from isal.isal_zlib import crc32
from torch.utils.data import Dataset

from azureml_strategy.data.readers import FolderReader
from azureml_strategy.data.sampler import ResumableLoader, TrainingSampler
from azureml_strategy.data.shard_index import ShardIndex

NAME = "worker_memory"
SAMPLES, DISTINCT, RECORD = 1_300_000, 1_000, 4_096


class Packed(Dataset[torch.Tensor]):
    """Records of the set, as bytes."""

    def __init__(self, folder: Path, index: ShardIndex) -> None:
        self.reader = FolderReader(folder, index)

    def __len__(self) -> int:
        return len(self.reader.index)

    def __getitem__(self, draw: int) -> torch.Tensor:
        (content,) = self.reader.read([draw % len(self)])
        assert isinstance(content, bytes)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class Listed(Packed):
    """The same records, with a Python object for each sample, as a list of paths and labels is."""

    def __init__(self, folder: Path, index: ShardIndex) -> None:
        super().__init__(folder, index)
        self.samples = [(f"train/n{number % 1000:08}/{number}.JPEG", number % 1000) for number in range(SAMPLES)]

    def __getitem__(self, draw: int) -> torch.Tensor:
        name, label = self.samples[draw % len(self)]
        return super().__getitem__(len(name) * 0 + label)


def made_up_set(folder: Path) -> ShardIndex:
    records = np.random.default_rng(0).integers(0, 256, (DISTINCT, RECORD), dtype=np.uint8)
    (folder / "all.tar").write_bytes(records.tobytes())
    checksums = np.array([crc32(record.tobytes()) for record in records], np.uint32)
    which = np.arange(SAMPLES) % DISTINCT
    return ShardIndex(
        "images",
        ("all.tar",),
        np.array([records.nbytes], np.int64),
        np.zeros(SAMPLES, np.uint32),
        which * RECORD,
        np.full(SAMPLES, RECORD, np.uint32),
        (which % 1000).astype(np.int32),
        checksums[which],
    )


def memory_by_epoch(data: Dataset[Any], epochs: int, batches: int, workers: int) -> list[float]:
    """Megabytes of the workers' own memory, on average, after each epoch."""
    sampler = TrainingSampler(data, 1, 0, seed=0)  # type: ignore[arg-type]
    loader = ResumableLoader(data, sampler=sampler, batch_size=256, num_workers=workers, persistent_workers=True)
    found = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for _, _ in zip(range(batches), loader, strict=False):
            pass
        own = [each.memory_full_info().uss / 1e6 for each in psutil.Process().children()]
        found.append(sum(own) / len(own))
    return found  # the workers end with their loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batches", type=int, default=400, help="of 256 samples, in each epoch")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        index = made_up_set(folder)
        cases: dict[str, Callable[[], Packed]] = {
            "packed": lambda: Packed(folder, index),
            "lists of Python objects": lambda: Listed(folder, index),
        }
        numbers = (options.epochs, options.batches, options.workers)
        measured = {name: memory_by_epoch(make(), *numbers) for name, make in cases.items()}
    growth = {name: each[-1] / each[1] for name, each in measured.items()}
    figures = {"megabytes_by_epoch": measured, "last_to_second_epoch": growth, "target": "packed at most 1.02"}
    save(NAME, {"samples": SAMPLES, **vars(options), "results": None}, figures, options.results)
    rows = [[name, *(f"{value:.1f}" for value in each), f"{growth[name]:.3f}"] for name, each in measured.items()]
    show("A worker's own memory, MB", ["data", *map(str, range(1, options.epochs + 1)), "last to second"], rows)


if __name__ == "__main__":
    main()
