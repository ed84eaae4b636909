"""The table of Fabric's strategies and training loops: the numbers of one process, or an error before a wrong step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.multiprocess.conftest import RunJob, run_job  # noqa: F401
from tests.multiprocess.conftest import _empty_store as _empty_store
from tests.situations.loops import LOOPS
from tests.situations.refused_by_fabric import ENDS_LATER, LEFT_OUT, REFUSED
from tests.situations.running import ALONE, differences

SCRIPT = Path(__file__).parent / "fabric.py"
WORLDS = (pytest.param(1, marks=pytest.mark.exhaustive), 2, pytest.param(4, marks=pytest.mark.exhaustive))
# The layouts whose table is whole. The others are run by hand.
JUDGED = ("ddp", "fsdp2", "zero_2")
Results = dict[str, dict[str, Any]]


@pytest.mark.parametrize("world", WORLDS)
def test_a_loop_has_the_numbers_of_one_process_or_an_error(run_job: RunJob, tmp_path: Path, world: int) -> None:  # noqa: F811
    alone = run_job(SCRIPT, tmp_path / ALONE, ALONE, in_job=False)
    assert alone.exit_code == 0, alone.output
    oracle = _read(tmp_path / ALONE / "0.jsonl")
    job = run_job(SCRIPT, tmp_path / "job", ",".join(JUDGED), nodes=world)
    assert job.exit_code == 0, job.output
    ranks = [_read(tmp_path / "job" / f"{rank}.jsonl") for rank in range(world)]
    wrong = [
        f"{layout}/{name}, rank {rank}: {words}"
        for layout in JUDGED
        for name in LOOPS
        if name not in LEFT_OUT.get(layout, ())
        for rank, found in enumerate(ranks)
        for words in _judge(layout, name, found.get(f"{layout}/{name}"), oracle[f"{ALONE}/{name}"])
    ]
    assert not wrong, "\n".join(wrong)


def _judge(layout: str, name: str, found: dict[str, Any] | None, oracle: dict[str, Any]) -> list[str]:
    if found is None:
        return ["did not run"]
    refused = REFUSED.get(layout, {}).get(name)
    if refused is not None:
        later = name in ENDS_LATER.get(layout, ())
        right = refused in found.get("error", "") and (later or found["steps"] == 0)
        when = "before a wrong step" if later else "before the first step"
        return [] if right else [f"should end {when} with {refused!r}: {str(found)[:500]}"]
    return [f"{found['error']} after {found['steps']} steps"] if "error" in found else differences(found, oracle)


def _read(file: Path) -> Results:
    return dict(map(json.loads, file.read_text().splitlines())) if file.is_file() else {}
