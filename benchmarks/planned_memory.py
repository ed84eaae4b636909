"""The planned memory of a rank beside what real trainings take on the CPU, and beside the usual estimate.

    python benchmarks/planned_memory.py                                  # gpt_tiny and resnet50
    python benchmarks/planned_memory.py --models gpt_125m --size 256     # 10 GB and minutes a case

Each case is a real training, of one or two ranks over loopback, by `tests/planning/measured.py`. The usual estimate is
16 bytes a parameter, divided by the ranks that share it, without activations.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import RESULTS, save, show
from tests.planning.measured import Case
from tests.planning.test_memory import measure

NAME = "planned_memory"
TARGET = 0.1
STRATEGIES = ("ddp", "ddp_copies", "zero_1", "zero_2", "zero_3", "fsdp2", "pipeline")


def compare(case: Case) -> list[dict[str, Any]]:
    """The figures of each rank of a case."""
    with tempfile.TemporaryDirectory() as folder:
        found = measure(case, Path(folder))
    rows = []
    for rank, each in enumerate(found):
        measured, planned = each["measured"], each["planned"]
        rows.append(
            {
                **asdict(case),
                "rank": rank,
                "measured_resident": measured["resident"],
                "planned_resident": planned["resident"],
                "measured_peak": measured["peak"],
                "planned_peak": planned["allocated"],
                "moment": planned["moment"],
                "error": planned["allocated"] / measured["peak"] - 1,
                "naive_error": planned["naive"] / measured["peak"] - 1,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"folder to write {NAME}.json into")
    parser.add_argument("--models", nargs="+", default=["gpt_tiny", "resnet50"])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--precisions", nargs="+", default=["32-true"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--size", type=int, default=0, help="tokens of a sequence, or pixels of a side")
    return parser.parse_args()


def main() -> None:
    options = parse()
    cases = [
        Case(model, strategy, ranks, precision, options.batch, options.size)
        for model in options.models
        for precision in options.precisions
        for ranks in options.ranks
        for strategy in options.strategies
    ]
    rows = [row for case in cases for row in compare(case)]
    errors = {name: max(abs(row[name]) for row in rows) for name in ("error", "naive_error")}
    figures = {"cases": rows, "largest": errors, "target": {"error_at_most": TARGET, "met": errors["error"] <= TARGET}}
    save(NAME, {**vars(options), "results": None}, figures, options.results)
    table = [
        [
            *(f"{row['model']}, {row['precision']}", row["strategy"], f"{row['rank']} of {row['ranks']}"),
            *(f"{row['measured_peak'] / 1e6:,.1f}", f"{row['planned_peak'] / 1e6:,.1f}"),
            *(f"{row['error']:+.1%}", f"{row['naive_error']:+.1%}"),
        ]
        for row in rows
    ]
    columns = ["model", "strategy", "rank", "measured, MB", "planned, MB", "error", "16 bytes a parameter"]
    show("Peak of a rank", columns, table)


if __name__ == "__main__":
    main()
