"""The table of Fabric's strategies and training loops: the numbers of one process, or an error before a wrong step."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.multiprocess.conftest import RunJob, run_job  # noqa: F401
from tests.multiprocess.conftest import _empty_store as _empty_store
from tests.situations.judging import judge_fabric, read
from tests.situations.loops import LOOPS
from tests.situations.refused_by_fabric import LEFT_OUT
from tests.situations.running import ALONE

SCRIPT = Path(__file__).parent / "fabric.py"
# The layouts whose table is whole. The others are run by hand.
JUDGED = ("ddp", "fsdp2", "zero_2")
# How many processes, and which loops of a layout: each has another share of them in `make test`.
PARTS = [
    pytest.param(2, "some", id="2-some"),
    *(pytest.param(world, "all", id=f"{world}-all", marks=pytest.mark.exhaustive) for world in (1, 2, 4)),
]


@pytest.mark.parametrize(("world", "part"), PARTS)
def test_a_loop_has_the_numbers_of_one_process_or_an_error(
    run_job: RunJob,  # noqa: F811
    tmp_path: Path,
    world: int,
    part: str,
) -> None:
    tried = [(layout, name) for layout in JUDGED for name in _loops(layout, part)]
    alone = run_job(SCRIPT, tmp_path / ALONE, ALONE, *dict.fromkeys(name for _, name in tried), in_job=False)
    assert alone.exit_code == 0, alone.output
    oracle = read(tmp_path / ALONE / "0.jsonl")
    job = run_job(SCRIPT, tmp_path / "job", ",".join(JUDGED), *map("/".join, tried), nodes=world)
    assert job.exit_code == 0, job.output
    ranks = [read(tmp_path / "job" / f"{rank}.jsonl") for rank in range(world)]
    wrong = [
        f"{layout}/{name}, rank {rank}: {words}"
        for layout, name in tried
        for rank, found in enumerate(ranks)
        for words in judge_fabric(layout, name, found, oracle)
    ]
    assert not wrong, "\n".join(wrong)


def _loops(layout: str, part: str) -> list[str]:
    names = [name for name in LOOPS if name not in LEFT_OUT.get(layout, ())]
    return names if part == "all" else names[JUDGED.index(layout) :: len(JUDGED)]
