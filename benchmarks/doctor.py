"""How long `azureml-strategy doctor` keeps somebody waiting, beside torch's own report of an environment.

    python benchmarks/doctor.py

Each measurement is a new process, from its start to its end; what a bare interpreter takes in the same round is
subtracted. `torch.utils.collect_env` is what bug reports to PyTorch begin with; it imports torch and runs other tools.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import RESULTS, Spread, differences, interleave, save, show, spread

BARE, HERE = "bare interpreter", "azureml-strategy doctor"
PEER = "python -m torch.utils.collect_env"
TARGET_S = 0.6
PROGRAM = str(Path(sysconfig.get_path("scripts")) / "azureml-strategy")
# A rank of a job of two nodes.
JOB = {
    "AZUREML_RUN_ID": "run",
    "AZUREML_NODE_COUNT": "2",
    "AZUREML_CR_COMPUTE_CONTEXT": '{"vm_size": "Standard_ND96isr_H100_v5"}',
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "NODE_RANK": "0",
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "6105",
}
LINE = "host-{0:02}:10:20 [0] NCCL INFO Channel 00/0 : {0}[0] -> {1}[0] [send] via NET/IB/0/GDRDMA\n"


def cases(log: Path) -> dict[str, tuple[list[str], Mapping[str, str]]]:
    """Command and additional variables of each competitor."""
    return {
        BARE: ([sys.executable, "-c", "pass"], {}),
        HERE: ([PROGRAM, "doctor"], {}),
        f"{HERE} --json": ([PROGRAM, "doctor", "--json"], {}),
        f"{HERE}, in a job": ([PROGRAM, "doctor"], JOB),
        f"{HERE} --log, 1 MB": ([PROGRAM, "doctor", "--log", str(log)], {}),
        PEER: ([sys.executable, "-m", "torch.utils.collect_env"], {}),
    }


def run_s(command: Sequence[str], variables: Mapping[str, str]) -> float:
    """Seconds from the start of a process to its end. Its exit code is 1 where it finds a problem."""
    environ = {**os.environ, **variables}
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, env=environ, check=False)
    seconds = time.perf_counter() - start
    if done.returncode not in (0, 1) or done.stderr.startswith(b"Traceback"):
        raise RuntimeError(done.stderr.decode())
    return seconds


def write_log(folder: str) -> Path:
    """A log of some 64 hosts with a megabyte of channel lines."""
    lines = [LINE.format(index % 64, (index + 1) % 64) for index in range(12_000)]
    path = Path(folder) / "nccl.log"
    path.write_text("".join(lines))
    return path


def measure(rounds: int, warmup: int) -> dict[str, Any]:
    """Wall time of each command, what it adds to a bare interpreter, and whether the target is met."""
    with tempfile.TemporaryDirectory() as folder:
        competitors = {name: partial(run_s, *case) for name, case in cases(write_log(folder)).items()}
        measured = interleave(competitors, rounds, warmup)
    wall = {name: spread(values) for name, values in measured.items()}
    added = {name: differences(values, measured[BARE]) for name, values in measured.items()}
    target = {"at_most_s": TARGET_S, "met": wall[HERE].median <= TARGET_S}
    return {"wall_s": wall, "added_s": added, "targets": {HERE: target}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="even, so that each order comes as often")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before, which fill the caches of the disk")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write doctor.json into")
    options = parser.parse_args()
    figures = measure(options.rounds, options.warmup)
    save("doctor", {"rounds": options.rounds, "warmup": options.warmup}, figures, options.results)
    wall: dict[str, Spread] = figures["wall_s"]
    added: dict[str, Spread] = figures["added_s"]
    rows = [[name, wall[name].text(1e3), added[name].text(1e3)] for name in wall]
    show("A new process: median (quartiles)", ["what", "wall, ms", "above the interpreter, ms"], rows)


if __name__ == "__main__":
    main()
