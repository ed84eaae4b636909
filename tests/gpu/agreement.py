"""Judges what the cells of the matrix trained to, against stock Lightning."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.gpu.matrix import ORACLE, PRECISIONS, REFUSED, Cells, Results

# How far a loss may lie from stock Lightning's, relative to the first one. A sum in another order in float32; then the
# distance of two neighbouring numbers of bfloat16 (8 bits) or float16 (11 bits), for values that are rounded at other
# places. With `bf16-true` stock Lightning rounds the weights of each step too, where DeepSpeed has a copy in float32.
TOLERANCE = {"32-true": 5e-5, "bf16-mixed": 2.0**-8, "bf16-true": 2.0**-7, "16-mixed": 2.0**-10}
assert TOLERANCE.keys() == set(PRECISIONS)
# A running variance is of squares, and normalises from 0: its distance is relative to the largest of the layer.
STATISTICS = {precision: 4 * tolerance for precision, tolerance in TOLERANCE.items()}
# A constant is the one in float32, made on a GPU or on the CPU, which may differ in the last bit of a cosine.
CONSTANT = 2.0**-20
Ranks = Sequence[Results]


@dataclass(frozen=True)
class Verdict:
    """What became of a cell.

    Attributes:
        world: number of processes.
        cell: `LAYOUT/PRECISION/MODEL`.
        right: whether that is as it should be.
        words: the largest distance, or what is wrong.
    """

    world: int
    cell: str
    right: bool
    words: str


def judge(jobs: Mapping[int, Ranks], chosen: Cells) -> list[Verdict]:
    """Compare each cell of each job with the oracle.

    Args:
        jobs: what the ranks wrote, by the number of ranks.
        chosen: cells that are to be there.
    """
    return [
        verdict
        for world, ranks in jobs.items()
        for layout, precision, model in chosen
        for verdict in [_judge(jobs, world, ranks, layout, precision, model)]
    ]


def table(verdicts: Sequence[Verdict]) -> str:
    """A row for each layout, precision and number of ranks, with one letter for each model; then what is wrong."""
    models = list(dict.fromkeys(verdict.cell.split("/")[2] for verdict in verdicts))
    rows: dict[tuple[str, str, int], dict[str, str]] = {}
    for verdict in verdicts:
        layout, precision, model = verdict.cell.split("/")
        mark = ("refused" if verdict.words.startswith("refused") else "ok") if verdict.right else "WRONG"
        rows.setdefault((layout, precision, verdict.world), {})[model] = mark
    lines = [f"{'layout':18}{'precision':12}ranks  " + " ".join(f"{model:11}" for model in models)]
    for (layout, precision, world), marks in rows.items():
        cells = " ".join(f"{marks.get(model, '-'):11}" for model in models)
        lines.append(f"{layout:18}{precision:12}{world:<7}{cells}")
    wrong = [f"{each.world} rank(s), {each.cell}: {each.words}" for each in verdicts if not each.right]
    return "\n".join([*lines, *wrong])


def _judge(jobs: Mapping[int, Ranks], world: int, ranks: Ranks, layout: str, precision: str, model: str) -> Verdict:
    cell = f"{layout}/{precision}/{model}"
    found = [rank[cell] for rank in ranks if cell in rank]
    errors = sorted({each["error"] for each in found if "error" in each})
    if not errors and len(found) < world:
        return Verdict(world, cell, False, f"{world - len(found)} of {world} ranks did not run it to its end")
    if (layout, precision) in REFUSED:
        named = all("error" in each and each["steps"] == 0 and precision in each["error"] for each in found)
        why = f"refused: {REFUSED[layout, precision]}" if named else f"should be refused before a step: {errors}"
        return Verdict(world, cell, named, why)
    if errors:
        return Verdict(world, cell, False, f"after {found[0].get('steps', 0)} steps: {' / '.join(errors)}")
    # One replica, however many stages it has, reads what one process reads.
    oracles = jobs[1] * world if layout == "pipeline" else ranks
    problems, largest = [], 0.0
    for rank, (mine, other) in enumerate(zip(found, oracles, strict=True)):
        stock = other.get(f"{ORACLE}/{precision}/{model}", {"error": "was not run"})
        if "error" in stock:
            return Verdict(world, cell, False, f"stock Lightning itself: {stock['error']}")
        largest = max(largest, distance(mine, stock))
        problems += [f"rank {rank}: {words}" for words in _problems(mine, stock, precision)]
    problems += [] if layout == "pipeline" else _missing(found[0], ranks[0][f"{ORACLE}/{precision}/{model}"])
    return Verdict(world, cell, not problems, "; ".join(problems) or f"{largest:.1e}")


def distance(mine: Mapping[str, Any], stock: Mapping[str, Any]) -> float:
    """The largest distance of two cells' losses, that of the validation included, relative to the first loss."""
    pairs = zip([*mine["losses"], mine["val_loss"]], [*stock["losses"], stock["val_loss"]], strict=True)
    return max(_apart(one, other) for one, other in pairs) / float(stock["losses"][0])


def _apart(one: float, other: float) -> float:
    """The distance of two numbers; infinite if one is none, as `max` passes over what is not a number."""
    return math.inf if math.isnan(one - other) else abs(one - other)


def _problems(mine: Mapping[str, Any], stock: Mapping[str, Any], precision: str) -> Iterator[str]:
    losses, tolerance = stock["losses"], TOLERANCE[precision]
    if max(losses) - min(losses) < 10 * tolerance * losses[0]:
        yield f"the oracle learns too little to tell anything: {losses}"
    if distance(mine, stock) > tolerance:
        mean = [round(loss, 5) for loss in (*mine["losses"], mine["val_loss"])]
        yield f"losses {mean}, stock Lightning's {[round(loss, 5) for loss in (*losses, stock['val_loss'])]}"
    for name, values in mine["buffers"].items():
        theirs = stock["buffers"][name]
        most = max(map(abs, theirs["values"]))
        apart = max(_apart(*pair) for pair in zip(values["values"], theirs["values"], strict=True)) / most
        constant = precision.endswith("mixed") and "running_" not in name
        if not apart <= (CONSTANT if constant else STATISTICS[precision]):
            yield f"{name} is {apart:.1e} away"
        if precision.endswith("mixed") and values["type"] != theirs["type"]:
            yield f"{name} is kept in {values['type']}"


def _missing(mine: Mapping[str, Any], stock: Mapping[str, Any]) -> list[str]:
    lost = stock["buffers"].keys() - mine["buffers"].keys()
    return [f"no {name}" for name in sorted(lost)]
