"""How long does a process take to open a packed set of 1.3 million samples, and what does it keep in memory?"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness import RESULTS, interleave, save, show, spread

from azureml_strategy.data.shard_index import INDEX_NAME, ShardIndex

# A process of its own each time: reads the list of samples, finds 1,000 of them, and says what that took.
_MEASURED = """
import sys, time
from pathlib import Path
import psutil
{imports}
own = psutil.Process()
before, start = own.memory_info().rss, time.perf_counter()
{opened}
for number in range(0, count, count // 1000):
    {found}
print(time.perf_counter() - start, own.memory_info().rss - before, own.memory_info().rss)
"""
_CASES = {
    "index.npz": {
        "imports": "from azureml_strategy.data.shard_index import load_index",
        "opened": "index = load_index(Path(sys.argv[1]) / 'index.npz'); index.digest; count = len(index)",
        "found": "index.name(number), index.length[number], index.label[number], index.checksum[number]",
    },
    "JSON of the same, a line a sample": {
        "imports": "import json",
        "opened": "index = [json.loads(line) for line in open(sys.argv[1] + '/index.json')]; count = len(index)",
        "found": "index[number]['shard'], index[number]['length'], index[number]['label']",
    },
}


def make(folder: Path, samples: int, shards: int) -> None:
    """Write an index like that of ImageNet at 256 pixels."""
    rng = np.random.default_rng(0)
    shard = np.sort(rng.integers(0, shards, samples)).astype(np.uint32)
    length = rng.integers(5_000, 60_000, samples).astype(np.uint32)
    padded = 1024 + 512 + (length.astype(np.int64) + 511) // 512 * 512
    ends = np.cumsum(padded)
    first = np.searchsorted(shard, np.arange(shards))
    offset = ends - padded - (ends - padded)[first][shard] + 512
    sizes = np.maximum.reduceat(offset + length, first) + 10_240
    index = ShardIndex(
        "images",
        tuple(f"train-{number:06}.tar" for number in range(shards)),
        sizes,
        shard,
        offset,
        length,
        rng.integers(0, 1000, samples).astype(np.int32),
        rng.integers(0, 2**32, samples, dtype=np.uint32),
        tuple(f"n{number:08}" for number in range(1000)),
    )
    index.save(folder / INDEX_NAME)
    columns = zip(shard.tolist(), offset.tolist(), length.tolist(), index.label.tolist(), strict=True)
    with (folder / "index.json").open("w") as file:
        for each, begins, size, label in columns:
            json.dump({"shard": index.shards[each], "offset": begins, "length": size, "label": label}, file)
            file.write("\n")


def measure(case: str, folder: Path) -> tuple[float, float, float]:
    """Seconds, megabytes that opening adds, and megabytes of the whole process."""
    command = [sys.executable, "-c", _MEASURED.format(**_CASES[case]), str(folder)]
    seconds, added, whole = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(seconds), float(added) / 1e6, float(whole) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_300_000)
    parser.add_argument("--shards", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make(folder, options.samples, options.shards)
        sizes = {name: (folder / name).stat().st_size for name in (INDEX_NAME, "index.json")}
        cases = {case: lambda case=case: measure(case, folder) for case in _CASES}
        measured = interleave(cases, options.rounds)
    figures = {
        case: dict(zip(("seconds", "added_mb", "process_mb"), map(spread, zip(*values, strict=True)), strict=True))
        for case, values in measured.items()
    }
    settings = {name: getattr(options, name) for name in ("samples", "shards", "rounds")} | {"bytes": sizes}
    save("open_index", settings, figures, options.results)
    rows = [[case, *(each.text(digits=2) for each in values.values())] for case, values in figures.items()]
    show(f"Opening a set of {options.samples:,} samples", ("index", "seconds", "MB added", "MB of the process"), rows)


if __name__ == "__main__":
    main()
