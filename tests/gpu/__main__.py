"""`make test-gpu`: what only a GPU can show, in five minutes; a table and a JSON at the end.

    python -m tests.gpu                               # one NVIDIA GPU
    python -m tests.gpu --accelerator cpu --only demo # tries the command itself, without one

Exits with 1 where something is wrong or was not judged in time. What cannot be here is listed with the reason.
SIGTERM or Ctrl-C ends what it has started; what was judged until then is written all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
from tests.gpu.parts import Part, parts
from tests.gpu.running import ROOT, Machine, Row, program

sys.path.append(str(ROOT / "benchmarks"))
from harness import save

from azureml_strategy.tracking.timing.goodput import process_age_s

# Of the time, what is kept for the parts that need the GPU for themselves.
_KEPT_S = 60.0
# Parts of many cases, of which those are counted alone.
_MANY = {"ok": ("matrix", "situations", "loops", "compiled"), "refused": ("situations", "loops")}


def _name(part: Part) -> str:
    function = getattr(part, "func", part)
    arguments = getattr(part, "keywords", {})
    named = [str(value) for name, value in arguments.items() if name != "layouts"]
    return " ".join([function.__name__.removesuffix("_part"), *named])


def _run(part: Part, machine: Machine) -> list[Row]:
    started = time.monotonic()
    try:
        rows = part(machine)
    except Exception as error:  # the other parts are to be judged
        traceback.print_exc()
        rows = [Row(_name(part), "all", "WRONG", f"{type(error).__name__}: {error}")]
    counted = Counter(row.status for row in rows)
    print(f"{_name(part)}: {dict(counted)}, {time.monotonic() - started:.0f} s", flush=True)
    return rows


def _all(chosen: Sequence[Part], machine: Machine, at_once: int) -> list[Row]:
    if not chosen:
        return []
    with ThreadPoolExecutor(at_once) as pool:
        return [row for rows in pool.map(lambda part: _run(part, machine), chosen) for row in rows]


def table(rows: Sequence[Row]) -> str:
    """How many cases of each part are well; then each that is not, and each that was left out."""
    statuses = ("ok", "refused", "left out", "WRONG")
    lines = [f"{'part':32}" + "".join(f"{status:>10}" for status in statuses)]
    for part in dict.fromkeys(row.part for row in rows):
        counted = Counter(row.status for row in rows if row.part == part)
        lines.append(f"{part:32}" + "".join(f"{counted[status] or '-':>10}" for status in statuses))
    told = [row for row in rows if row.status in ("left out", "WRONG") or not row.part.startswith(_MANY[row.status])]
    return "\n".join([*lines, "", *(f"{row.status:9} {row.part}: {row.case}: {row.words}" for row in told)])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--accelerator", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "test-gpu", help="folder for test_gpu.json")
    parser.add_argument("--budget", type=float, default=290.0, help="seconds from this process's start to its end")
    parser.add_argument("--only", nargs="+", help="parts by the beginnings of their names, as demo or 'matrix 1'")
    parser.add_argument("--keep", type=Path, help="folder for what the parts write; by default one that is removed")
    options = parser.parse_args()
    if options.accelerator == "cuda" and not torch.cuda.is_available():
        parser.error(
            "torch sees no GPU here. `make test` has what a CPU can show; --accelerator cpu tries this command."
        )
    try:
        program()
    except FileNotFoundError as error:
        parser.error(str(error))
    return options


def main() -> int:
    # To import torch, Lightning and transformers takes some of the time.
    options, started = _parse(), time.monotonic() - process_age_s()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        cores = len(os.sched_getaffinity(0))
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        machine = Machine(options.accelerator, folder, started + options.budget, cores, gpus)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: machine.stop())
        at_once, alone = (
            [part for part in some if not options.only or any(map(_name(part).startswith, options.only))]
            for some in parts()
        )
        machine.deadline -= _KEPT_S if alone and options.accelerator == "cuda" else 0.0
        rows = _all(at_once, machine, max(1, len(at_once)))
        machine.deadline = started + options.budget
        rows += _all(alone, machine, 1)
    seconds = time.monotonic() - started
    settings = {"accelerator": options.accelerator, "only": options.only, "budget_s": options.budget}
    wrong = sum(row.status == "WRONG" for row in rows)
    figures = {"seconds": round(seconds, 1), "wrong": wrong, "rows": [asdict(row) for row in rows]}
    path = save("test_gpu", json.loads(json.dumps(settings)), figures, options.output)
    print(f"\n{table(rows)}\n\n{len(rows)} cases, {wrong} wrong, {seconds:.0f} s: {path}")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
