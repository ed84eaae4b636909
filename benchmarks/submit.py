"""How long `azureml-strategy submit --dry-run` keeps somebody waiting, and how long a large folder takes to list.

    python benchmarks/submit.py

The first is measured in new processes, from start to end, beside `import azure.ai.ml` alone, which is its floor: the
job is made of that library's classes and written by its schema. The second lists 10,000 files by azure-ai-ml's own
rules, with an `.amlignore` of twelve lines, beside a walk that only asks for the sizes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import RESULTS, Spread, differences, interleave, save, show, spread

BARE, FLOOR, HERE = "bare interpreter", "import azure.ai.ml", "azureml-strategy submit --dry-run"
WALK, LIST = "os.walk and sizes", "list_snapshot"
DRY_RUN_S, SNAPSHOT_S = 3.0, 2.0
PROGRAM = str(Path(sysconfig.get_path("scripts")) / "azureml-strategy")
SUBMIT = ["submit", "resnet50_imagenet", "cluster=nd96amsr_a100_v4", "cluster.num_nodes=4", "--dry-run"]
IGNORED = (".git/", ".venv/", "__pycache__/", "*.egg-info/", "outputs/", "mlruns/", "build/", "dist/", "*.pyc")
IGNORED += ("/data/", "*.ckpt", "logs/**/*.txt")


def commands() -> dict[str, list[str]]:
    """The command of each competitor."""
    return {
        BARE: [sys.executable, "-c", "pass"],
        FLOOR: [sys.executable, "-W", "ignore", "-c", "import azure.ai.ml"],
        HERE: [PROGRAM, *SUBMIT],
    }


def run_s(command: Sequence[str]) -> float:
    """Seconds from the start of a process to its end."""
    start = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - start


def make_folder(folder: Path, files: int) -> None:
    """A folder of code: a hundred files in each folder below."""
    for index in range(files):
        path = folder / f"package_{index // 100}" / "inner" / f"module_{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    (folder / ".amlignore").write_text("\n".join(IGNORED) + "\n")


def walk_s(folder: Path) -> float:
    """Seconds of a walk that asks for each file's size."""
    start = time.perf_counter()
    for parent, _, names in os.walk(folder):
        for name in names:
            os.path.getsize(os.path.join(parent, name))
    return time.perf_counter() - start


def list_s(folder: Path, files: int) -> float:
    """Seconds of our listing."""
    from azureml_strategy.jobs.snapshot import list_snapshot

    start = time.perf_counter()
    listed = list_snapshot(str(folder))
    seconds = time.perf_counter() - start
    if len(listed.files) != files + 1:
        raise RuntimeError(f"{len(listed.files)} files are listed, {files + 1} are there")
    return seconds


def measure(rounds: int, warmup: int, files: int) -> dict[str, Any]:
    """Wall times, what each process adds to a bare interpreter, and whether the targets are met."""
    processes = interleave({name: partial(run_s, command) for name, command in commands().items()}, rounds, warmup)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folder(folder, files)
        lists = interleave({WALK: partial(walk_s, folder), LIST: partial(list_s, folder, files)}, rounds, warmup)
    wall = {name: spread(values) for name, values in (processes | lists).items()}
    limits = {HERE: DRY_RUN_S, LIST: SNAPSHOT_S}
    return {
        "wall_s": wall,
        "added_s": {name: differences(values, processes[BARE]) for name, values in processes.items()},
        "targets": {name: {"at_most_s": most, "met": wall[name].median <= most} for name, most in limits.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="even, so that each order comes as often")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before, which fill the caches of the disk")
    parser.add_argument("--files", type=int, default=10_000, help="files of the folder that is listed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write submit.json into")
    options = parser.parse_args()
    figures = measure(options.rounds, options.warmup, options.files)
    settings = {"rounds": options.rounds, "warmup": options.warmup, "files": options.files}
    save("submit", settings, figures, options.results)
    wall: dict[str, Spread] = figures["wall_s"]
    rows = [[name, each.text(1, 2)] for name, each in wall.items()]
    show("Median (quartiles)", ["what", "wall, s"], rows)


if __name__ == "__main__":
    main()
