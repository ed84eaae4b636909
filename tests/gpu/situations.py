"""The table of situations on a GPU: what users' scripts do, against one process on the same GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tests.gpu.running import ROOT, Machine, Row
from tests.situations import loops, refused, refused_by_fabric
from tests.situations import running as trainer
from tests.situations.judging import Results, judge, judge_fabric, read

SCRIPTS = ROOT / "tests" / "situations"
OF_FABRIC = ("ddp", "fsdp2", "zero_1", "zero_2", "zero_3")
# torch draws other numbers for a DTensor on a GPU than for a tensor, of the same seed.
DRAWS = {(layout, "new_head") for layout in ("fsdp2", "tensor_parallel")}


def situations_part(machine: Machine, world: int, layouts: Sequence[str]) -> list[Row]:
    """Each layout of the Trainer's in a job of its own, all situations in one go."""
    names = {
        layout: [name for name in trainer.SITUATIONS if name not in refused.LEFT_OUT.get(layout, ())]
        for layout in layouts
    }
    if machine.accelerator == "cuda":
        names = {layout: [name for name in some if (layout, name) not in DRAWS] for layout, some in names.items()}
    names[trainer.ALONE] = list(trainer.SITUATIONS)
    found, oracle = _ran(machine, "running.py", world, names)
    return [
        _row(f"situations, {world} rank(s)", layout, name, ranks, partial(judge, layout, name, world, oracle=oracle))
        for layout, ranks in found.items()
        for name in names[layout]
    ]


def loops_part(machine: Machine, layouts: Sequence[str]) -> list[Row]:
    """The loops of Fabric's on one rank."""
    names = {
        layout: [name for name in loops.LOOPS if name not in refused_by_fabric.LEFT_OUT.get(layout, ())]
        for layout in layouts
    }
    names[trainer.ALONE] = list(loops.LOOPS)
    found, oracle = _ran(machine, "fabric.py", 1, names)
    return [
        _row("loops of Fabric", layout, name, ranks, partial(judge_fabric, layout, name, oracle=oracle))
        for layout, ranks in found.items()
        for name in names[layout]
    ]


def _ran(
    machine: Machine, script: str, world: int, names: dict[str, list[str]]
) -> tuple[dict[str, list[Results]], Results]:
    """What each rank of each layout wrote, and the oracle."""
    with ThreadPoolExecutor(len(names)) as pool:
        ranks = list(pool.map(lambda layout: _layout(machine, script, layout, world, names[layout]), names))
    found = dict(zip(names, ranks, strict=True))
    (oracle,) = found.pop(trainer.ALONE)
    return found, oracle


def _layout(machine: Machine, script: str, layout: str, world: int, names: list[str]) -> list[Results]:
    """All situations of a layout; an error ends its job, and the next ones need another."""
    world = 1 if layout == trainer.ALONE else world
    job = f"{script}-{world}-{layout}"
    output = machine.folder / job / "results"
    extra = {"SITUATIONS_ACCELERATOR": machine.accelerator}
    ranks, left = [read(output / f"{rank}.jsonl") for rank in range(world)], names
    while left:
        machine.run(job, [sys.executable, str(SCRIPTS / script), str(output), layout, *left], world, 240, extra)
        ranks = [read(output / f"{rank}.jsonl") for rank in range(world)]
        done = [index for index, name in enumerate(left) if any(f"{layout}/{name}" in mine for mine in ranks)]
        left = left[max(done) + 1 :] if done and not machine.is_over() else []
    return ranks


def _row(part: str, layout: str, name: str, ranks: Iterable[Results], judged: Callable[[Results], list[str]]) -> Row:
    wrong = [f"rank {rank}: {words}" for rank, mine in enumerate(ranks) for words in judged(mine)]
    ended = any("error" in mine.get(f"{layout}/{name}", {}) for mine in ranks)
    status = "WRONG" if wrong else "refused" if ended else "ok"
    return Row(part, f"{layout}/{name}", status, "; ".join(wrong)[:600])
