"""The planned memory of a rank beside what real trainings take on the CPU, and beside the usual estimate.

    python benchmarks/planned_memory.py                                # an hour
    python benchmarks/planned_memory.py --models gpt_tiny --ranks 1    # a piece of it; what is written stays
    python benchmarks/planned_memory.py --only-plan                    # measures nothing

Each case is a real training, of one or two ranks over loopback, by `tests/planning/measured.py`. The plan of a case is
written before its training starts. A case that the results have is not measured again, until `--anew`. The usual
estimate is 16 bytes a parameter, divided by the ranks that share it, without activations.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import RESULTS, save, show
from tests.planning.measured import Case, planned
from tests.planning.test_memory import measure

NAME = "planned_memory"
TARGET = 0.1
STRATEGIES = ("ddp", "zero_1", "zero_2", "zero_3", "fsdp2", "pipeline")
# Samples of a rank, and the length of a sequence or the side of an image: what two ranks hold in 12 GB together.
SHAPES = {"gpt_tiny": (4, 128), "gpt_125m": (2, 256), "resnet50": (4, 64)}
CORRECTED_ON = ("gpt_tiny", "resnet50")
# Rows by the name of the case; one a rank.
Rows = dict[str, list[dict[str, Any]]]


def name_of(case: Case) -> str:
    return f"{case.model}, {case.strategy}, {case.precision}, {case.ranks} rank{'s' * (case.ranks > 1)}"


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def plan(case: Case) -> list[dict[str, Any]]:
    """A row for each rank, with what the plan says."""
    rows = []
    for rank in range(case.ranks):
        memory = planned(case, rank)
        rows.append(
            {
                **asdict(case),
                "rank": rank,
                "model_corrected_on_it": case.model in CORRECTED_ON,
                "planned": now(),
                "planned_resident": memory["resident"],
                "planned_peak": memory["allocated"],
                "moment": memory["moment"],
                "naive_peak": memory["naive"],
                "not_measured": "planned only",
            }
        )
    return rows


def compare(case: Case, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with what a training takes, or with the reason why there was none."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = measure(case, Path(folder))
        except (
            AssertionError,
            subprocess.SubprocessError,
        ) as error:  # a rank has failed; the others are worth going on
            return [{**row, "not_measured": str(error).strip().splitlines()[-1]} for row in rows]
    return [_compared(row, each["measured"]) for row, each in zip(rows, found, strict=True)]


def _compared(row: dict[str, Any], measured: dict[str, int]) -> dict[str, Any]:
    return {
        **{name: value for name, value in row.items() if name != "not_measured"},
        "measured": now(),
        "measured_resident": measured["resident"],
        "measured_peak": measured["peak"],
        "error": row["planned_peak"] / measured["peak"] - 1,
        "naive_error": row["naive_peak"] / measured["peak"] - 1,
    }


def figures(cases: Rows) -> dict[str, Any]:
    """The cases, and the largest errors: of those that the model was corrected on, and of the others."""
    rows = [row for each in cases.values() for row in each if "error" in row]
    largest = {
        name: {
            error: max((abs(row[error]) for row in rows if row["model_corrected_on_it"] == seen), default=None)
            for error in ("error", "naive_error")
        }
        for name, seen in (("corrected_on", True), ("planned_before", False))
    }
    missed = sorted({f"{name}, rank {row['rank']}" for name, own in cases.items() for row in own if _misses(row)})
    return {"cases": cases, "largest": largest, "target": {"error_at_most": TARGET, "missed": missed}}


def _misses(row: dict[str, Any]) -> bool:
    return "error" in row and abs(row["error"]) > TARGET


def written(results: Path) -> Rows:
    """The cases that an earlier run has written."""
    path = results / f"{NAME}.json"
    return json.loads(path.read_text())["figures"]["cases"] if path.exists() else {}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"folder to write {NAME}.json into")
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--precisions", nargs="+", default=["32-true"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only-plan", action="store_true", help="write the plans of cases that have none")
    parser.add_argument("--anew", action="store_true", help="plan and measure again what was measured")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[Case]:
    return [
        Case(model, strategy, ranks, precision, *SHAPES[model])
        for model in options.models
        for precision in options.precisions
        for ranks in options.ranks
        for strategy in options.strategies
    ]


def main() -> None:
    options = parse()
    settings = {"shapes": SHAPES, "precisions": options.precisions}
    cases = written(options.results)
    for case in chosen(options):
        name = name_of(case)
        if options.anew or name not in cases:
            cases[name] = plan(case)
            save(NAME, settings, figures(cases), options.results)
        if not options.only_plan and any("error" not in row for row in cases[name]):
            cases[name] = compare(case, cases[name])
            save(NAME, settings, figures(cases), options.results)
        print(json.dumps(cases[name]), flush=True)
    show_all(cases)


def show_all(cases: Rows) -> None:
    table = [
        [
            name,
            str(row["rank"]),
            f"{row['measured_peak'] / 1e6:,.1f}" if "error" in row else row["not_measured"],
            f"{row['planned_peak'] / 1e6:,.1f}",
            f"{row['error']:+.1%}" if "error" in row else "",
            f"{row['naive_error']:+.1%}" if "error" in row else "",
        ]
        for name, rows in cases.items()
        for row in rows
    ]
    show("Peak of a rank", ["case", "rank", "measured, MB", "planned, MB", "error", "16 bytes a parameter"], table)


if __name__ == "__main__":
    main()
