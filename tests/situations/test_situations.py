"""The table of strategies and situations: the numbers of one process, or a refusal before the first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.multiprocess.conftest import RunJob, run_job  # noqa: F401
from tests.multiprocess.conftest import _empty_store as _empty_store
from tests.situations.refused import LEFT_OUT, OF_FOUR, REFUSED, STOPS_LATER
from tests.situations.running import ALONE, SITUATIONS, differences

SCRIPT = Path(__file__).parent / "running.py"
JUDGED = ("ddp", "local_sgd", "fsdp2", "tensor_parallel", "zero_1", "zero_2", "zero_3", "pipeline")
# How many processes, and which situations of a layout: each has another share of them in `make test`.
SHARES = 4
PARTS = [
    pytest.param(2, "some", id="2-some"),
    *(pytest.param(world, "all", id=f"{world}-all", marks=pytest.mark.exhaustive) for world in (1, 2, 4)),
]
# What people report most is tried in each.
ALWAYS = ("manual_layers", "backbone_finetuning", "stochastic_weight_averaging", "shared_layer")
# One rank of a pipeline or of tensor parallelism can do some of what several cannot, and says other words.
ANY_OR_RIGHT = ""
Results = dict[str, dict[str, Any]]


@pytest.mark.parametrize(("world", "part"), PARTS)
@pytest.mark.parametrize("layout", JUDGED)
def test_a_strategy_has_the_numbers_of_one_process_or_refuses(
    run_job: RunJob,  # noqa: F811
    tmp_path: Path,
    layout: str,
    world: int,
    part: str,
) -> None:
    names = _situations(layout, part)
    alone = run_job(SCRIPT, tmp_path / ALONE, ALONE, *names, in_job=False)
    assert alone.exit_code == 0, alone.output
    oracle = _read(tmp_path / ALONE / "0.jsonl")
    job = run_job(SCRIPT, tmp_path / layout, layout, *names, nodes=world)
    assert job.exit_code == 0, job.output
    ranks = [_read(tmp_path / layout / f"{rank}.jsonl") for rank in range(world)]
    wrong = [
        f"{name}, rank {rank}: {words}"
        for name in names
        for rank, found in enumerate(ranks)
        for words in _judge(
            found.get(f"{layout}/{name}"),
            oracle[f"{ALONE}/{name}"],
            _refused(layout, name, world),
            name in STOPS_LATER.get(layout, ()),
        )
    ]
    assert not wrong, "\n".join(wrong)


def _situations(layout: str, part: str) -> list[str]:
    names = [name for name in SITUATIONS if name not in LEFT_OUT.get(layout, ())]
    share = names[JUDGED.index(layout) % SHARES :: SHARES]
    return names if part == "all" else [name for name in names if name in share or name in ALWAYS]


def _refused(layout: str, name: str, world: int) -> str | None:
    words = {**REFUSED[layout], **(OF_FOUR.get(layout, {}) if world == 4 else {})}.get(name)
    alone = world == 1 and layout in ("pipeline", "tensor_parallel")
    return ANY_OR_RIGHT if words is not None and alone else words


def _judge(found: dict[str, Any] | None, oracle: dict[str, Any], refused: str | None, later: bool) -> list[str]:
    if found is None:
        return ["did not run"]
    if refused is not None and not (refused is ANY_OR_RIGHT and "error" not in found):
        right = refused in found.get("error", "") and (found["refused"] if later else found["steps"] == 0)
        when = "before a wrong step" if later else "before the first step"
        return [] if right else [f"should be refused {when} with {refused!r}: {found}"]
    return [f"{found['error']} after {found['steps']} steps"] if "error" in found else differences(found, oracle)


def _read(file: Path) -> Results:
    return dict(map(json.loads, file.read_text().splitlines())) if file.is_file() else {}
