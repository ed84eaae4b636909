"""All that a machine with a GPU is asked, in two goes of eight minutes: `make test-gpu` and NCCL; then how fast it is.

    python benchmarks/on_a_gpu.py            # one NVIDIA GPU or more; `make gpu`
    python benchmarks/on_a_gpu.py --speed    # `make gpu GPU=--speed`
    python benchmarks/on_a_gpu.py --smoke    # the same programs with tiny numbers, on a CPU: do they run?

Each program has a limit of time of its own, and writes its JSON with the machine into the folder of results. One that
fails or takes too long does not keep the next from running. The exit code is 1 if any of them did.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from harness import RESULTS, save, show

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.gpu.running import ROOT, absolute, end_tree

HERE = Path(__file__).parent
# Between SIGTERM and SIGKILL a program may write what it has.
GRACE_S = 8.0
SMOKE_PARTS = ("synchronisation gpt_ddp", "absent", "marked")


@dataclass(frozen=True)
class Program:
    """One program of the day.

    Attributes:
        name: of its JSON.
        command: without the folder of results.
        folder: the option that takes this folder.
        limit_s: seconds after which it is told to end; `GRACE_S` later it is killed with all that it has started.
    """

    name: str
    command: tuple[str, ...]
    folder: str
    limit_s: float


def programs(go: str, smoke: bool = False) -> list[Program]:
    """Those of a go, `right` or `fast`, for a GPU, 480 s at most; or what of them runs on a CPU."""
    tests = (sys.executable, "-m", "tests.gpu")
    resnet, gpt = ((sys.executable, str(HERE / name)) for name in ("resnet50_gpu.py", "gpt_gpu.py"))
    if go == "fast":
        tiny = ("--smoke", "--rounds", "1") if smoke else ()
        return [
            Program("resnet50_gpu", (*resnet, "--no-mlflow", *tiny), "--results", 600 if smoke else 212),
            Program("gpt_gpu", (*gpt, *tiny), "--results", 900 if smoke else 250),
        ]
    if smoke:
        options = ("--accelerator", "cpu", "--budget", "280", "--only", *SMOKE_PARTS)
        return [Program("test_gpu", (*tests, *options), "--output", 300)]
    return [
        Program("test_gpu", (*tests, "--budget", "385"), "--output", 400),
        Program("nccl_gpu", (sys.executable, str(HERE / "nccl_gpu.py")), "--results", 50),
    ]


def run(program: Program, results: Path) -> tuple[str, float]:
    """What became of it, and the seconds it took."""
    started = time.monotonic()
    path = [str(ROOT), *absolute(os.environ.get("PYTHONPATH", ""))]
    command = [*program.command, program.folder, str(results)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    process = subprocess.Popen(command, cwd=ROOT, env=environ, start_new_session=True)
    try:
        code: int | None = process.wait(program.limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:  # also at Ctrl-C, which does not reach it
        end_tree(process, GRACE_S)
    seconds = time.monotonic() - started
    if code is None:
        return f"ended after {program.limit_s:.0f} s", seconds
    if code == 0 and not (results / f"{program.name}.json").is_file():
        return "wrote no JSON", seconds
    return "ok" if code == 0 else f"exit code {code}", seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON files")
    parser.add_argument("--speed", action="store_true", help="the second go")
    parser.add_argument("--smoke", action="store_true", help="tiny numbers, on a CPU")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="programs by the names of their JSON files")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the program that runs is ended, too
    results = options.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    rows, figures = [], {}
    for program in programs("fast" if options.speed else "right", options.smoke):
        if options.only and program.name not in options.only:
            continue
        (results / f"{program.name}.json").unlink(missing_ok=True)  # one of another day is no result of this one
        became, seconds = run(program, results)
        rows.append([program.name, became, f"{seconds:.0f} s"])
        figures[program.name] = {"became": became, "seconds": round(seconds, 1)}
    save("on_a_gpu", {"speed": options.speed, "smoke": options.smoke, "only": options.only}, figures, results)
    show("On this machine", ["program", "", "time"], rows)
    sys.exit(any(each["became"] != "ok" for each in figures.values()))


if __name__ == "__main__":
    main()
