"""How fast `read_transport` reads a log, and how much memory it takes, beside reading the lines alone.

    python benchmarks/read_transport.py

The log is made of what jobs of four nodes with eight GPUs write under NCCL_DEBUG=INFO: channel lines, other messages of
NCCL, and the training's own output. One core is used.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from harness import RESULTS, interleave, save, show, spread

from azureml_strategy.network.nccl_log import describe, read_transport

MEGABYTE = 10**6
TARGET_MB_PER_S = 50
PLAIN = "read_transport, plain"
# Shares of lines; a job of a few minutes has more channel lines, a long one more of its own output.
SHARES = {"training": 0.50, "local": 0.30, "network": 0.15, "other": 0.05}
PREFIXES = {
    "plain": "",
    "mpirun": "[1,{rank}]<stdout>:",
    "kubernetes": "2026-01-01T12:00:00.{step:09d}Z ",
    "logger": "[2026-01-01 12:00:00] [INFO] [rank {rank}] ",
}
# VmHWM, because the peak that getrusage gives of a new process is at least that of the process which started it.
PEAK = (
    "import sys, pathlib; from azureml_strategy.network.nccl_log import read_transport;"
    "read_transport(pathlib.Path(sys.argv[1])); status = pathlib.Path('/proc/self/status').read_text();"
    "print(status.partition('VmHWM:')[2].split()[0])"
)
CHANNEL = re.compile(r"(\S+):\d+:\d+ \[\d+\] NCCL INFO Channel (\d+).*via (NET|P2P|SHM)/(\S+)")


def line(kind: str, step: int, chance: random.Random) -> str:
    """One line of a job."""
    node, gpu, channel = chance.randrange(4), chance.randrange(8), chance.randrange(24)
    rank = 8 * node + gpu
    start = f"ip-0A2304{node:02X}:{93000 + gpu}:{93500 + gpu} [{gpu}] NCCL INFO "
    if kind == "network":
        return f"{start}Channel {channel:02}/0 : {rank}[{gpu}] -> {rank ^ 8}[{gpu}] [send] via NET/IB/{gpu}/GDRDMA"
    if kind == "local":
        return f"{start}Channel {channel:02}/0 : {rank}[{gpu}] -> {rank + 1}[{(gpu + 1) % 8}] via P2P/CUMEM/read"
    if kind == "other":
        trees = " ".join(f"[{tree}] {gpu}/-1/-1->{rank}->{rank - 1}" for tree in range(8))
        return start + chance.choice([f"Trees {trees}", "Connected all rings", f"comm 0x7f rank {rank} nranks 32"])
    return f"[2026-01-01 12:00:00][INFO] epoch 3 step {step} loss {chance.random():.4f} images/s {chance.random():.1f}"


def write_log(path: Path, megabytes: int, prefix: str) -> None:
    """A log of at least this size; the lines of its first megabytes repeat."""
    chance = random.Random(0)
    kinds = chance.choices(list(SHARES), list(SHARES.values()), k=40_000)
    lines = [prefix.format(rank=step % 8, step=step) + line(kind, step, chance) for step, kind in enumerate(kinds)]
    block = ("\n".join(lines) + "\n").encode()
    with path.open("wb") as file:
        for _ in range(megabytes * MEGABYTE // len(block) + 1):
            file.write(block)


def seconds(read: Callable[[Path], Any], path: Path) -> float:
    """Processor seconds that reading takes, which other processes of the machine change little."""
    start = time.process_time()
    read(path)
    return time.process_time() - start


def lines_alone(path: Path) -> int:
    """The least that anything does that looks at lines."""
    with path.open(errors="replace") as file:
        return sum(1 for _ in file)


def an_expression_a_line(path: Path) -> int:
    """What a script does that searches each line for channels."""
    with path.open(errors="replace") as file:
        return sum(1 for _ in filter(CHANNEL.search, file))


def logs(folder: Path, megabytes: int) -> Iterator[tuple[str, Path]]:
    """The log with each prefix; only the first has its full size."""
    for name, prefix in PREFIXES.items():
        path = folder / f"{name}.log"
        write_log(path, megabytes if name == "plain" else max(megabytes // 8, 1), prefix)
        yield name, path


def peak_mebibytes(path: Path) -> float:
    """Memory of a new process that reads the log, at its peak."""
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    return round(int(done.stdout) / 1024, 1)


def measure(folder: Path, megabytes: int, rounds: int, warmup: int) -> dict[str, Any]:
    """Megabytes a second of each case, and peak memory for a small and for the whole log."""
    paths = dict(logs(folder, megabytes))
    empty = folder / "empty.log"
    empty.touch()
    cases = {f"read_transport, {name}": partial(seconds, read_transport, path) for name, path in paths.items()}
    cases["lines alone"] = partial(seconds, lines_alone, paths["plain"])
    cases["an expression a line"] = partial(seconds, an_expression_a_line, paths["plain"])
    sizes = {f"read_transport, {name}": path.stat().st_size / MEGABYTE for name, path in paths.items()}
    measured = interleave(cases, rounds, warmup)
    plain = sizes[PLAIN]
    rates = {name: spread([sizes.get(name, plain) / value for value in values]) for name, values in measured.items()}
    return {
        "mb_per_s": rates,
        "peak_mib": {"empty": peak_mebibytes(empty), "plain": peak_mebibytes(paths["plain"])},
        "log_mb": round(plain, 1),
        "read": describe(read_transport(paths["plain"])),
        "target": {"at_least_mb_per_s": TARGET_MB_PER_S, "met": rates[PLAIN].median >= TARGET_MB_PER_S},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=240, help="size of the log")
    parser.add_argument("--rounds", type=int, default=6, help="even, so that each order comes as often")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write read_transport.json into")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options.megabytes, options.rounds, options.warmup)
    settings = {"megabytes": options.megabytes, "rounds": options.rounds, "warmup": options.warmup, "shares": SHARES}
    save("read_transport", settings, figures, options.results)
    rows = [[name, rate.text()] for name, rate in figures["mb_per_s"].items()]
    show(f"Reading a log of {figures['log_mb']} MB: median (quartiles)", ["what", "MB/s of one core"], rows)
    peak = figures["peak_mib"]
    print(f"Peak memory: {peak['plain']} MiB, of which {peak['empty']} for Python and the reader without a log")


if __name__ == "__main__":
    main()
