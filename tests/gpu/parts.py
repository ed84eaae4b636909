"""The parts of `make test-gpu`: what each runs, and how it is judged."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from tests.gpu import compiling, families, matrix
from tests.gpu.agreement import judge
from tests.gpu.gloo import NEEDS
from tests.gpu.running import DETERMINISTIC, ROOT, Ended, Machine, Row, program
from tests.gpu.situations import OF_FABRIC, loops_part, situations_part
from tests.situations import running as situations

Part = Callable[[Machine], list[Row]]
Ranks = list[matrix.Results]
HERE = Path(__file__).parent
# The shipped recipes, small enough for a few seconds; those that need data or a model are not among them.
_IMAGES = ("data.image_size=64", "data.batch_size=8", "model.warmup_epochs=0", "checkpoint=none")
_NO_CHECKPOINT = ("checkpoint=none", "checkpoint.filename=null", "checkpoint.monitor=null", "checkpoint.mode=null")
_TEXT = ("data.batch_size=4", "model.warmup_steps=2", *_NO_CHECKPOINT)
RECIPES = {
    "resnet50_synthetic": (*_IMAGES, "data.steps_per_epoch=40"),
    "resnet50_ddp": _IMAGES,
    "resnet50_local_sgd": (*_IMAGES, "strategy.warmup_steps=2"),
    "resnet50_pipeline": (*_IMAGES, "strategy.num_stages=1"),
    "gpt_ddp": _TEXT,
    "gpt_zero3": _TEXT,
    "gpt_tensor_parallel": _TEXT,
    "gpt_pipeline": (*_TEXT, "strategy.num_stages=1"),
    "gpt_diloco": (*_TEXT, "strategy.warmup_steps=2", "strategy.period=4"),
}
RESUMED = {"ddp": "ddp", "zero_3": "deepspeed_stage_3", "fsdp2": "model_parallel"}
# Points of forward and backward between what the breakdown and torch.profiler call waiting for the host.
HOST_TOLERANCE = 0.05
ACCURACY = 0.95  # what README promises of the demo


def matrix_part(machine: Machine, world: int, layouts: Sequence[str]) -> list[Row]:
    """The matrix on so many ranks: each layout is a job of its own, and stock Lightning is one too."""
    part = f"matrix, {world} rank(s)"
    left_out: dict[str, tuple[str, str]] = {}
    if world > 1 and machine.accelerator == "cuda":
        left_out = _without_collectives(machine)
    layouts = [layout for layout in layouts if layout not in left_out]
    jobs = [(world, layout) for layout in (matrix.ORACLE, *layouts)] + ([(1, matrix.ORACLE)] if world > 1 else [])
    with ThreadPoolExecutor(len(jobs)) as pool:
        found = list(pool.map(lambda job: _cells(machine, *job), jobs))
    merged: dict[int, Ranks] = {size: [{} for _ in range(size)] for size in {1, world}}
    for (size, _), ranks in zip(jobs, found, strict=True):
        merged[size] = [{**mine, **new} for mine, new in zip(merged[size], ranks, strict=True)]
    chosen = matrix.cells(layouts, machine.accelerator)
    if world > 1:  # a refusal needs no second rank
        chosen = [(layout, *rest) for layout, *rest in chosen if (layout, rest[0]) not in matrix.REFUSED]
    rows = [
        Row(part, verdict.cell, _status(verdict.right, verdict.words), verdict.words)
        for verdict in judge(merged, chosen)
        if verdict.world == world
    ]
    return rows + [Row(part, layout, *why) for layout, why in left_out.items()]


def _cells(machine: Machine, world: int, layout: str) -> Ranks:
    """All cells of a layout; one that fails on several ranks ends its job, and the next ones need another."""
    name = f"matrix-{world}-{layout}"
    output, chosen = machine.folder / name, matrix.cells([layout], machine.accelerator)
    command = [sys.executable, str(HERE / "matrix.py"), str(output), "--accelerator", machine.accelerator]
    ranks: Ranks = []
    for _ in chosen:
        before = sum(map(len, ranks))
        machine.run(name, [*command, "--layouts", layout], world, limit_s=180)
        ranks = matrix.read(output, world)
        if not matrix.left(chosen, ranks) or sum(map(len, ranks)) == before:
            break
    return ranks


def _without_collectives(machine: Machine) -> dict[str, tuple[str, str]]:
    """The layouts that two ranks on one GPU cannot have: left out where gloo says so, wrong where it says nothing."""
    output = machine.folder / "gloo"
    ended = machine.run(
        "gloo", [sys.executable, str(HERE / "gloo.py"), str(output), machine.accelerator], 2, limit_s=60
    )
    told = output / "0.json"
    if ended.late or not told.is_file():
        return dict.fromkeys(NEEDS, ("WRONG", f"which collectives gloo has here is unknown: {ended.failure}"))
    missing = json.loads(told.read_text())
    return {
        layout: ("left out", f"gloo has no {need} of a GPU: {missing[need]}")
        for layout, needs in NEEDS.items()
        for need in needs
        if need in missing
    }


def _status(right: bool, words: str) -> str:
    if not right:
        return "WRONG"
    return "refused" if words.startswith("refused") else "ok"


def families_part(machine: Machine) -> list[Row]:
    """Models of transformers on one rank, each strategy in a process of its own."""
    part = "transformers"
    if find_spec("transformers") is None:
        return [Row(part, "all", "left out", "transformers is not installed")]
    layouts = [layout for layout in matrix.LAYOUTS if layout != matrix.ORACLE]
    with ThreadPoolExecutor(len(layouts)) as pool:
        return [row for rows in pool.map(lambda layout: _families(machine, part, layout), layouts) for row in rows]


def _families(machine: Machine, part: str, layout: str) -> list[Row]:
    name = f"families-{layout}"
    command = [sys.executable, str(HERE / "families.py"), str(machine.folder / name)]
    ended = machine.run(name, [*command, "--accelerator", machine.accelerator, "--layouts", layout], limit_s=150)
    if ended.failure:
        return [Row(part, layout, "WRONG", ended.failure)]
    found = json.loads((machine.folder / name / "0.json").read_text())
    rows = []
    for family in families.FAMILIES:
        mine, alone = found[f"{layout}/32-true/{family}"], found[f"{families.ORACLE}/32-true/{family}"]["losses"]
        case = f"{layout}/{family}"
        if "error" in mine:
            refused = (layout, family) in families.REFUSED and mine["steps"] == 0
            rows.append(Row(part, case, "refused" if refused else "WRONG", mine["error"][:300]))
            continue
        apart = max(abs(one - other) / other for one, other in zip(mine["losses"], alone, strict=True))
        rows.append(Row(part, case, "ok" if apart <= families.TOLERANCE else "WRONG", f"{apart:.1e} from torch alone"))
    return rows


def compiling_part(machine: Machine) -> list[Row]:
    """The shipped models compiled against uncompiled, on one rank, each strategy in a process of its own."""
    with ThreadPoolExecutor(len(compiling.COMPILED_LAYOUTS)) as pool:
        found = pool.map(partial(_compiled, machine), compiling.COMPILED_LAYOUTS)
        return [row for rows in found for row in rows]


def _compiled(machine: Machine, layout: str) -> list[Row]:
    part, name = "compiled", f"compiled-{layout}"
    command = [sys.executable, str(HERE / "compiling.py"), str(machine.folder / name), "--layouts", layout]
    ended = machine.run(name, [*command, "--accelerator", machine.accelerator], limit_s=180)
    (found,) = matrix.read(machine.folder / name, 1)
    missing = {"right": False, "words": ended.failure or "it was not run"}
    names = ["/".join(cell) for cell in compiling.cells([layout])]
    judged = {case: found.get(case, missing) for case in names}
    return [Row(part, case, "ok" if each["right"] else "WRONG", each["words"]) for case, each in judged.items()]


def restarting_part(machine: Machine) -> list[Row]:
    """A compiled training that was killed: its next attempt, on a disk without compiled code, compiles nothing."""
    part, case = "compiled code after kill -9", "gpt"
    output = machine.folder / "restarting" / "output"
    for attempt, code in enumerate((-9, 0)):
        disk = machine.folder / f"restarting-disk{attempt}"
        disk.mkdir()
        command = [sys.executable, str(HERE / "restarting.py"), str(output), str(attempt)]
        command += ["--accelerator", machine.accelerator]
        ended = machine.run("restarting", command, extra={"TMPDIR": str(disk)})
        if ended.late or ended.codes != (code,):
            return [Row(part, case, "WRONG", f"attempt {attempt}: {ended.failure or 'it was not killed'}")]
    first, second = (json.loads((output / f"{attempt}.json").read_text()) for attempt in range(2))
    words = f"{first['compiled']} graphs compiled, then {second['compiled']}, and {second['found']} found"
    # The order of sums on several threads is not the same in each process.
    equal = all(map(partial(math.isclose, rel_tol=1e-6), second["losses"], first["losses"]))
    right = first["compiled"] > 0 == second["compiled"] and equal
    return [Row(part, case, "ok" if right else "WRONG", words)]


def train(machine: Machine, name: str, recipe: str, *overrides: str, limit_s: float = 120, **extra: str) -> Ended:
    """Train a recipe without MLflow, with further callbacks from `tests.gpu.watching`."""
    trainer = ("trainer=cpu", "trainer.devices=1") if machine.accelerator == "cpu" else ()
    command = [*program(), "train", recipe, "tracking=console", f"output_dir={machine.folder / name / 'run'}", *trainer]
    return machine.run(name, [*command, *overrides], limit_s=limit_s, extra={**DETERMINISTIC, **extra})


def synchronisation_part(machine: Machine, recipe: str) -> list[Row]:
    """No step and no evaluation step of a recipe makes the host wait for the GPU; steps that log are apart."""
    part = "no synchronisation"
    watch = "callbacks={watch:{_target_:tests.gpu.watching.NoSynchronisation}}"
    few = ("trainer.max_steps=24", "trainer.limit_train_batches=24", "trainer.val_check_interval=24")
    quiet = (*few, "trainer.limit_val_batches=3", "trainer.log_every_n_steps=1000")
    ended = train(machine, f"sync-{recipe}", recipe, *RECIPES[recipe], *quiet, watch)
    found = re.findall(r"^waits for the GPU, \d+ times: .*", ended.output, re.M)
    if not found:
        steps = "12 steps" if machine.accelerator == "cuda" else "it runs; only a GPU can tell"
        return [Row(part, recipe, "WRONG" if ended.failure else "ok", ended.failure or steps)]
    # What DeepSpeed waits for is not ours to change; it is shown all the same.
    return [Row(part, recipe, "WRONG" if ended.failure else "left out", "; ".join(found))]


def resume_part(machine: Machine, name: str) -> list[Row]:
    """Killed in the middle and started again: losses and weights are those of a run without a break."""
    part, case = "kill -9 and resume", name
    overrides = [
        *(f"strategy={RESUMED[name]}", "trainer.deterministic=true", "trainer.max_steps=16", "data.batch_size=4"),
        *("trainer.val_check_interval=5", "trainer.limit_val_batches=1", "model.warmup_steps=2"),
    ]
    record = "callbacks={{record:{{_target_:tests.gpu.watching.Recorder,path:{path}{more}}}}}"
    paths = [machine.folder / f"resume-{name}-{kind}.json" for kind in ("whole", "again")]
    whole = train(machine, f"resume-{name}-whole", "gpt_ddp", *overrides, record.format(path=paths[0], more=""))
    killed = train(machine, f"resume-{name}", "gpt_ddp", *overrides, record.format(path=paths[1], more=",die_at:12"))
    if whole.failure or killed.codes != (-9,) or killed.late:
        return [Row(part, case, "WRONG", whole.failure or f"it was not killed: {killed.failure or 'it ended well'}")]
    again = train(machine, f"resume-{name}", "gpt_ddp", *overrides, record.format(path=paths[1], more=""))
    if again.failure:
        return [Row(part, case, "WRONG", again.failure)]
    expected, found = (json.loads(path.read_text()) for path in paths)
    common = found["losses"].keys() & expected["losses"].keys()
    same = all(found["losses"][step] == expected["losses"][step] for step in common)
    if not common or len(common) == len(expected["losses"]):
        return [Row(part, case, "WRONG", f"it went on with step {min(map(int, common or [0]))}, not from a checkpoint")]
    equal = same and found["weights"] == expected["weights"]
    words = f"{len(common)} steps after the resume, " + ("equal to the last bit" if equal else "and other numbers")
    return [Row(part, case, "ok" if equal else "WRONG", words)]


def breakdown_part(machine: Machine, recipe: str) -> list[Row]:
    """What the run says the GPU waits for its host in forward and backward, against torch.profiler's kernels there."""
    part = "breakdown and torch.profiler"
    if machine.accelerator == "cpu":
        return [Row(part, recipe, "left out", "only a GPU waits for its host")]
    found = machine.folder / f"breakdown-{recipe}.json"
    callback = f"callbacks={{waits:{{_target_:tests.gpu.watching.LaunchWaits,path:{found},last:180,steps:20}}}}"
    annotations = "trainer.profiler={_target_:tests.gpu.watching.Annotations}"
    size = ("trainer.max_steps=185", "trainer.limit_val_batches=0", "trainer.log_every_n_steps=20")
    data = ("data.steps_per_epoch=185",) if recipe == "resnet50_synthetic" else ()
    checkpoint = ("checkpoint=none",) if recipe == "resnet50_synthetic" else _NO_CHECKPOINT
    ended = train(machine, f"breakdown-{recipe}", recipe, *size, *data, *checkpoint, annotations, callback)
    if ended.failure:
        return [Row(part, recipe, "WRONG", ended.failure)]
    right, words = compare_waits(**json.loads(found.read_text()))
    return [Row(part, recipe, "ok" if right else "WRONG", words)]


def compare_waits(told: Mapping[str, float], seen: Mapping[str, float]) -> tuple[bool, str]:
    """Whether both give the same share of forward and backward to waiting for the host, and the shares.

    Args:
        told: parts of a step, as the breakdown logs them; communication is that of backward.
        seen: what `launch_waits` sums up.
    """
    if "forward" not in told:
        return False, f"the breakdown has no part `forward`: {sorted(told)}"
    if not seen["steps"]:
        return False, "each recorded step was held, or follows one that was"
    host = told.get("host", 0.0)  # a run that never waits for its host has no such part
    waits = host / (host + sum(told.get(name, 0.0) for name in ("forward", "backward", "communication")))
    idle = seen["waited_s"] / seen["span_s"]
    words = f"of forward and backward, host {waits:.0%}; torch.profiler: {idle:.0%} in {seen['steps']:.0f} steps"
    return abs(waits - idle) <= HOST_TOLERANCE, words


def demo_part(machine: Machine) -> list[Row]:
    """`make demo`, to the accuracy that README promises."""
    record = machine.folder / "demo.json"
    trainer = ("trainer=cpu",) if machine.accelerator == "cpu" else ()
    inner = [*program(), "train", "resnet50_ddp", "tracking=console", f"output_dir={machine.folder / 'demo' / 'run'}"]
    recorder = f"callbacks={{record:{{_target_:tests.gpu.watching.Recorder,path:{record}}}}}"
    command = [*program(), "emulate", "--nodes", "2", "--", *inner, *trainer, recorder]
    ended = machine.run("demo", command, limit_s=240)
    if ended.failure:
        return [Row("demo", "resnet50_ddp on two nodes", "WRONG", ended.failure)]
    top1 = json.loads(record.read_text())["metrics"]["val/top1"]
    return [Row("demo", "resnet50_ddp on two nodes", "ok" if top1 >= ACCURACY else "WRONG", f"val/top1 {top1:.3f}")]


def marked_part(machine: Machine) -> list[Row]:
    """The tests marked cuda: counters, a profile, clocks, nvJPEG and others."""
    part = "tests marked cuda"
    if machine.accelerator == "cpu":
        return [Row(part, "all", "left out", "they need a GPU")]
    files = sorted(str(each) for each in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in each.read_text())
    report = machine.folder / "marked.xml"
    command = [sys.executable, "-m", "pytest", "--gpu", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    command += [f"--junitxml={report}", "-c", str(ROOT / "pyproject.toml"), *files]
    ended = machine.run("marked", command, extra={"CUDA_VISIBLE_DEVICES": machine.gpus})
    if not report.is_file():
        return [Row(part, "all", "WRONG", ended.failure or "no report was written")]
    rows = [_of_test(part, case) for case in ElementTree.parse(report).iter("testcase")]
    return rows if rows else [Row(part, "all", "WRONG", "no test was found")]


def _of_test(part: str, case: ElementTree.Element) -> Row:
    name = f"{case.get('classname', '').removeprefix('tests.')}.{case.get('name')}"
    for kind, status in (("failure", "WRONG"), ("error", "WRONG"), ("skipped", "left out")):
        found = case.find(kind)
        if found is not None:
            return Row(part, name, status, (found.get("message") or "").partition("\n")[0][:300])
    return Row(part, name, "ok", f"{float(case.get('time', 0)):.1f} s")


def tuning_part(machine: Machine) -> list[Row]:
    """A rank that runs out of memory in a trial of `tune=True` leaves the training on both as it would have been."""
    part, case = "tuning", "memory runs out in a trial"
    output = machine.folder / "tuning"
    ended = machine.run("tuning", [sys.executable, str(HERE / "tuning.py"), str(output), machine.accelerator], 2)
    if ended.failure:
        return [Row(part, case, "WRONG", ended.failure)]
    ranks = [json.loads((output / f"{rank}.json").read_text()) for rank in range(2)]
    same = all(rank["tuned"]["losses"] == rank["untuned"]["losses"] for rank in ranks)
    words = ranks[0]["tuned"]["why"]
    told = all(rank["tuned"]["why"] == words for rank in ranks) and words.endswith(") on rank 1")
    return [Row(part, case, "ok" if same and told else "WRONG", words if same else f"other losses; {words}")]


def absent_part(machine: Machine) -> list[Row]:
    """What `make test` has and this command has not, by what is missing here."""
    needed = {"flask": "a server of MLflow", "azure.ai.ml": "jobs of Azure ML", "torchcodec": "nvJPEG"}
    return [
        Row("not here", what, "left out", f"{module} is not installed")
        for module, what in needed.items()
        if not _installed(module)
    ]


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def parts() -> tuple[list[Part], list[Part]]:
    """What runs at once, the longest first; and what needs the GPU for itself after it."""
    layouts = [layout for layout in matrix.LAYOUTS if layout != matrix.ORACLE]
    at_once: list[Part] = [
        *(demo_part, partial(matrix_part, world=1, layouts=layouts), families_part, compiling_part, restarting_part),
        partial(situations_part, world=1, layouts=list(situations.LAYOUTS)),
        *(partial(matrix_part, world=2, layouts=layouts), partial(loops_part, layouts=OF_FABRIC)),
        partial(situations_part, world=2, layouts=("ddp", "local_sgd")),
        *(partial(resume_part, name=name) for name in RESUMED),
        *(partial(synchronisation_part, recipe=recipe) for recipe in RECIPES),
        *(tuning_part, marked_part, absent_part),
    ]
    return at_once, [partial(breakdown_part, recipe=recipe) for recipe in ("gpt_ddp", "resnet50_synthetic")]
