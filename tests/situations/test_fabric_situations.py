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
WORLDS = (pytest.param(1, marks=pytest.mark.exhaustive), 2, pytest.param(4, marks=pytest.mark.exhaustive))
# The layouts whose table is whole. The others are run by hand.
JUDGED = ("ddp", "fsdp2", "zero_2")


@pytest.mark.parametrize("world", WORLDS)
def test_a_loop_has_the_numbers_of_one_process_or_an_error(run_job: RunJob, tmp_path: Path, world: int) -> None:  # noqa: F811
    alone = run_job(SCRIPT, tmp_path / ALONE, ALONE, in_job=False)
    assert alone.exit_code == 0, alone.output
    oracle = read(tmp_path / ALONE / "0.jsonl")
    job = run_job(SCRIPT, tmp_path / "job", ",".join(JUDGED), nodes=world)
    assert job.exit_code == 0, job.output
    ranks = [read(tmp_path / "job" / f"{rank}.jsonl") for rank in range(world)]
    wrong = [
        f"{layout}/{name}, rank {rank}: {words}"
        for layout in JUDGED
        for name in LOOPS
        if name not in LEFT_OUT.get(layout, ())
        for rank, found in enumerate(ranks)
        for words in judge_fabric(layout, name, found, oracle)
    ]
    assert not wrong, "\n".join(wrong)
