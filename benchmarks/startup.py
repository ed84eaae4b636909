"""How long an import of this package and its `--help` keep somebody waiting, beside libraries that they may know.

    python benchmarks/startup.py

Each measurement is a new process, from its start to its end; what a bare interpreter takes in the same round is
subtracted. `import lightning` is the peer that every training waits for anyway; Hydra's is that of a light library.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import RESULTS, Spread, differences, interleave, save, show, spread

BARE = "bare interpreter"
OUR_IMPORT, OUR_HELP = "import azureml_strategy", "azureml-strategy --help"
TARGETS_S = {OUR_IMPORT: ("added_s", 0.05), OUR_HELP: ("wall_s", 0.4)}
HEAVY = ("torch", "lightning", "mlflow", "hydra", "omegaconf", "numpy", "rich")
SCRIPTS = Path(sysconfig.get_path("scripts"))


def importing(module: str) -> list[str]:
    return [sys.executable, "-c", f"import {module}"]


def cases() -> dict[str, list[str]]:
    """The command of each competitor."""
    return {
        BARE: [sys.executable, "-c", "pass"],
        OUR_IMPORT: importing("azureml_strategy"),
        OUR_HELP: [str(SCRIPTS / "azureml-strategy"), "--help"],
        "import hydra": importing("hydra"),
        "torchrun --help": [str(SCRIPTS / "torchrun"), "--help"],
        "import lightning": importing("lightning"),
    }


def run_s(command: Sequence[str]) -> float:
    """Seconds from the start of a process to its end."""
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def heavy_modules() -> list[str]:
    """Which heavy libraries our import has brought along."""
    code = f"import json, sys, azureml_strategy; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return list(json.loads(answer))


def measure(rounds: int, warmup: int) -> dict[str, Any]:
    """Wall time of each command, what it adds to a bare interpreter, and whether ours keep to their targets."""
    measured = interleave({name: partial(run_s, command) for name, command in cases().items()}, rounds, warmup)
    wall = {name: spread(values) for name, values in measured.items()}
    added = {name: differences(values, measured[BARE]) for name, values in measured.items()}
    by_kind = {"wall_s": wall, "added_s": added}
    return {
        **by_kind,
        "heavy_modules_imported": heavy_modules(),
        "targets": {
            name: {"figure": kind, "at_most_s": limit, "met": by_kind[kind][name].median <= limit}
            for name, (kind, limit) in TARGETS_S.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=16, help="even, so that each order comes as often")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before, which fill the caches of the disk")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write startup.json into")
    options = parser.parse_args()
    figures = measure(options.rounds, options.warmup)
    save("startup", {"rounds": options.rounds, "warmup": options.warmup}, figures, options.results)
    wall: dict[str, Spread] = figures["wall_s"]
    added: dict[str, Spread] = figures["added_s"]
    rows = [[name, wall[name].text(1e3), added[name].text(1e3)] for name in wall]
    show("A new process: median (quartiles)", ["what", "wall, ms", "above the interpreter, ms"], rows)
    print(f"Heavy libraries that `{OUR_IMPORT}` loads: {', '.join(figures['heavy_modules_imported']) or 'none'}")


if __name__ == "__main__":
    main()
