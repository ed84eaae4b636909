"""Whether what a rank wrote of a situation, or of a loop of Fabric's, is as it should be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.situations import refused_by_fabric
from tests.situations.refused import OF_FOUR, REFUSED, STOPS_LATER
from tests.situations.running import ALONE, differences

Results = dict[str, dict[str, Any]]
# One rank of a pipeline or of tensor parallelism can do some of what several cannot, and says other words.
ANY_OR_RIGHT = ""


def judge(layout: str, name: str, world: int, found: Results, oracle: Results) -> list[str]:
    """What is wrong with a situation under a strategy of the Trainer's.

    Args:
        layout: a key of `running.LAYOUTS`.
        name: of the situation.
        world: number of ranks of the job.
        found: what one of them wrote.
        oracle: what one process without a strategy wrote.
    """
    words = {**REFUSED[layout], **(OF_FOUR.get(layout, {}) if world == 4 else {})}.get(name)
    alone = world == 1 and layout in ("pipeline", "tensor_parallel")
    words = ANY_OR_RIGHT if words is not None and alone else words
    later = name in STOPS_LATER.get(layout, ())
    mine = found.get(f"{layout}/{name}")
    if mine is not None and words is not None and not (words is ANY_OR_RIGHT and "error" not in mine):
        right = words in mine.get("error", "") and (mine["refused"] if later else mine["steps"] == 0)
        return [] if right else [f"should be refused {_when(later)} with {words!r}: {mine}"]
    return _compare(mine, oracle[f"{ALONE}/{name}"])


def judge_fabric(layout: str, name: str, found: Results, oracle: Results) -> list[str]:
    """As `judge`, with a loop of Fabric's; an error of torch's own may be what ends it."""
    words = refused_by_fabric.REFUSED.get(layout, {}).get(name)
    later = name in refused_by_fabric.ENDS_LATER.get(layout, ())
    mine = found.get(f"{layout}/{name}")
    if mine is not None and words is not None:
        right = words in mine.get("error", "") and (later or mine["steps"] == 0)
        return [] if right else [f"should end {_when(later)} with {words!r}: {str(mine)[:500]}"]
    return _compare(mine, oracle[f"{ALONE}/{name}"])


def _when(later: bool) -> str:
    return "before a wrong step" if later else "before the first step"


def _compare(mine: Mapping[str, Any] | None, oracle: Mapping[str, Any]) -> list[str]:
    if mine is None:
        return ["did not run"]
    if "error" in oracle:
        return [f"one process itself: {oracle['error']}"]
    return [f"{mine['error']} after {mine['steps']} steps"] if "error" in mine else differences(mine, oracle)


def read(file: Path) -> Results:
    """What a rank wrote, by `LAYOUT/SITUATION`; nothing if it wrote none."""
    return dict(map(json.loads, file.read_text().splitlines())) if file.is_file() else {}
