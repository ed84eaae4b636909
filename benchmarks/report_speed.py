"""How long `azureml-strategy report` keeps somebody waiting, for a run of 100,000 points.

    python benchmarks/report_speed.py
    python benchmarks/report_speed.py --points 10000000 --rounds 1    # bounded: a database sums them up

The whole command is measured in new processes, from start to end, beside a bare interpreter and `import mlflow` alone,
which a page of a run in a local store does without. The run has 50 metrics of as many points each, in SQLite.
"""

from __future__ import annotations

import argparse
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from harness import RESULTS, interleave, save, show, spread

BARE, FLOOR, HERE = "bare interpreter", "import mlflow", "azureml-strategy report"
TARGET_S, TARGET_POINTS = 5.0, 100_000
NAMES = [
    *(f"step/{name}_share" for name in ("data_wait", "copy", "forward", "backward", "communication", "other")),
    *(f"time/{name}_s" for name in ("startup", "training", "validation", "checkpoint", "wall")),
    *("throughput/samples_per_second", "throughput/step_time_median_s", "train/loss", "val/loss", "lr-SGD"),
    *(f"system/node-{node}/gpu_{gpu}_utilization_percentage" for node in range(2) for gpu in range(8)),
    *(f"train/metric_{number}" for number in range(18)),
]


def make_run(folder: Path, points: int) -> str:
    """A run with so many points, which SQLite itself makes: MLflow would take minutes for millions."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    run_id: str = client.create_run(client.create_experiment("speed", str(folder / "files"))).info.run_id
    for name in NAMES:
        client.log_metric(run_id, name, 0.5, 0, 0)
    with sqlite3.connect(folder / "mlflow.db") as database:
        database.executemany(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) INSERT INTO metrics"
            " (key, value, timestamp, step, run_uuid, is_nan)"
            " SELECT ?, (i * 7919 % 1000) / 1000.0, 1700000000000 + 100 * i, i, ?, 0 FROM n",
            [(points // len(NAMES) - 1, name, run_id) for name in NAMES],
        )
    return run_id


def run_s(command: Sequence[str], environ: dict[str, str]) -> tuple[float, float]:
    """Seconds from the start of a process to its end, and of the processor, which others' load does not change."""
    start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True, env=os.environ | environ)
    wall, now = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=TARGET_POINTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write into")
    parser.add_argument("--name", default="report_speed", help="of the file of results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_id = make_run(Path(folder), options.points)
        page = Path(folder) / "page.html"
        commands = {
            BARE: [sys.executable, "-c", "pass"],
            FLOOR: [sys.executable, "-W", "ignore", "-c", "import mlflow"],
            HERE: [sys.executable, "-m", "azureml_strategy.cli", "report", run_id, "--output", str(page)],
        }
        environ = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
        cases = {name: partial(run_s, command, environ) for name, command in commands.items()}
        measured = interleave(cases, options.rounds, options.warmup)
        size = page.stat().st_size
    report(measured, options, size)


def report(measured: dict[str, list[tuple[float, float]]], options: argparse.Namespace, size: int) -> None:
    """Print the table and write the results."""
    wall, cpu = ({name: spread([each[kind] for each in some]) for name, some in measured.items()} for kind in (0, 1))
    rows = [(name, wall[name].text(digits=2), cpu[name].text(digits=2)) for name in measured]
    show(f"A run of {options.points:,} points, page of {size:,} bytes", ("", "wall, s", "processor, s"), rows)
    figures = {"wall_s": wall, "cpu_s": cpu, "page_bytes": size}
    if options.points == TARGET_POINTS:
        figures["targets"] = {HERE: {"at_most_s": TARGET_S, "met": wall[HERE].median <= TARGET_S}}
    settings = {"points": options.points, "metrics": len(NAMES), "rounds": options.rounds, "warmup": options.warmup}
    save(options.name, settings, figures, options.results)


if __name__ == "__main__":
    main()
