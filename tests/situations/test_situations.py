"""The table of strategies and situations: the numbers of one process, or a refusal before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.multiprocess.conftest import RunJob, run_job  # noqa: F401
from tests.multiprocess.conftest import _empty_store as _empty_store
from tests.situations.judging import judge, read
from tests.situations.refused import LEFT_OUT
from tests.situations.running import ALONE, SITUATIONS

SCRIPT = Path(__file__).parent / "running.py"
JUDGED = ("ddp", "local_sgd", "fsdp2", "tensor_parallel", "zero_1", "zero_2", "zero_3", "pipeline")
# How many processes, which layouts in one job, and which situations: each layout has another share in `make test`.
SHARES = 8
PARTS = [
    pytest.param(2, JUDGED, "some", id="2-some"),
    *(
        pytest.param(world, [layout], "all", id=f"{layout}-{world}-all", marks=pytest.mark.exhaustive)
        for layout in JUDGED
        for world in (1, 2, 4)
    ),
]
# What people report most is tried in each.
ALWAYS = ("manual_layers", "backbone_finetuning", "stochastic_weight_averaging", "shared_layer")


@pytest.mark.parametrize(("world", "layouts", "part"), PARTS)
def test_a_strategy_has_the_numbers_of_one_process_or_refuses(
    run_job: RunJob,  # noqa: F811
    tmp_path: Path,
    world: int,
    layouts: Sequence[str],
    part: str,
) -> None:
    tried = [(layout, name) for layout in layouts for name in _situations(layout, part)]
    alone = run_job(SCRIPT, tmp_path / ALONE, ALONE, *dict.fromkeys(name for _, name in tried), in_job=False)
    assert alone.exit_code == 0, alone.output
    oracle = read(tmp_path / ALONE / "0.jsonl")
    job = run_job(SCRIPT, tmp_path / "job", ",".join(layouts), *map("/".join, tried), nodes=world)
    assert job.exit_code == 0, job.output
    ranks = [read(tmp_path / "job" / f"{rank}.jsonl") for rank in range(world)]
    wrong = [
        f"{layout}/{name}, rank {rank}: {words}"
        for layout, name in tried
        for rank, found in enumerate(ranks)
        for words in judge(layout, name, world, found, oracle)
    ]
    assert not wrong, "\n".join(wrong)


def _situations(layout: str, part: str) -> list[str]:
    names = [name for name in SITUATIONS if name not in LEFT_OUT.get(layout, ())]
    share = names[JUDGED.index(layout) % SHARES :: SHARES]
    return names if part == "all" else [name for name in names if name in share or name in ALWAYS]
