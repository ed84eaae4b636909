"""What the benchmarks share whose cases run in turns inside the processes of one emulated job."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import RESULTS, save

from azureml_strategy.emulator import EmulatedJob, EmulationError, emulate

Figures = dict[str, Any]


def parser(description: str, name: str) -> argparse.ArgumentParser:
    """A parser with the options that every such benchmark has.

    Args:
        description: the script's docstring.
        name: of the benchmark and its file of results.
    """
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--results", type=Path, default=RESULTS, help=f"folder to write {name}.json into")
    made.add_argument("--rank-results", type=Path, help=argparse.SUPPRESS)  # given to the job's processes
    return made


def run(
    name: str,
    options: argparse.Namespace,
    run_rank: Callable[[argparse.Namespace], Any],
    measure: Callable[[argparse.Namespace], Figures],
) -> Figures | None:
    """Measure and save; in a process of the job, do its part instead.

    Args:
        name: of the benchmark.
        options: parsed by `parser`.
        run_rank: all rounds of all cases, in one process of the job; what it returns must be JSON.
        measure: makes figures of it, with `run_job`.

    Returns:
        The figures; None in a process of the job.
    """
    if options.rank_results:
        measured = run_rank(options)
        if os.environ["RANK"] == "0":
            options.rank_results.write_text(json.dumps(measured))
        return None
    results = options.results.resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the emulated job writes its mlflow.db here
        figures = measure(options)
        save(name, settings(options), figures, results)
        os.chdir(results)
    return figures


def run_job(
    options: argparse.Namespace,
    figures: Callable[[Any], Figures],
    nodes: int = 2,
    bandwidth: str | None = None,
) -> Figures:
    """The figures of one emulated job, or why there are none.

    Args:
        options: each is given to the processes as well.
        figures: what to make of what rank 0 measured.
        nodes: of one process each.
        bandwidth: isolate the nodes, with links of this rate.
    """
    results = Path("rank_0.json").resolve()
    script = str(sys.modules["__main__"].__file__)  # absolute, whatever was typed
    command = [sys.executable, script, "--rank-results", str(results)]
    for name, value in (settings(options) | ({"bandwidth": bandwidth} if bandwidth else {})).items():
        values = value if isinstance(value, list) else [value]
        command += [f"--{name.replace('_', '-')}", *map(str, values)] if value is not None else []
    try:
        code = emulate(EmulatedJob(command, nodes=nodes, isolate=bandwidth is not None, bandwidth=bandwidth))
    except EmulationError as error:
        return {"skipped": str(error)}
    if code:
        raise SystemExit(code)
    return figures(json.loads(results.read_text()))


def settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name not in ("results", "rank_results")}
