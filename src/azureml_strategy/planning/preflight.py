"""Does it start on 64 GPUs? Tried here, on a machine without any, before they are rented.

The real Trainer, strategy, model and optimizer take their first steps, as the first rank of the job and as each rank
whose place differs: the last of each axis of the mesh, the stage in the middle of a pipeline. Each is a process of its
own, which answers its collectives itself (`pretended_group`) and computes nothing large (`unwritten_tensors`). So sizes
that do not divide or multiply end with the strategy's own message, and what a rank holds is counted, not estimated.

What cannot be known so: values. A run that needs certain numbers, a loss that must fall, is tried on real ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from azureml_strategy.planning.layout import different_ranks
from azureml_strategy.planning.pretended_ranks import PretendedJob, try_ranks


@dataclass(frozen=True)
class TriedRank:
    """What one rank holds after its first steps.

    Attributes:
        rank: its number.
        place: what makes it differ, in words.
        parameters: bytes of parameters.
        gradients: bytes of gradients before the optimizer's step.
        optimizer: bytes of the optimizer's states and copies.
        buffers: bytes of buffers.
    """

    rank: int
    place: str
    parameters: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True)
class Preflight:
    """How a run would start.

    Attributes:
        what: the recipe or command.
        nodes: nodes of the job.
        gpus_per_node: GPUs, and processes, of each.
        starts: whether each rank that was tried took its steps.
        problem: why not, in one sentence; empty if it starts.
        told: whether the problem is the strategy's own message to the user. Otherwise something could not be tried.
        strategy: class of the strategy.
        precision: of the Trainer.
        axes: sizes of the mesh's axes by name, the fastest last. Their product is the number of ranks.
        stages: first layer, last layer and trainable parameters of each stage of a pipeline.
        buckets: bytes of DDP's buckets of gradients, in the order of sending.
        batch: shapes of the tensors in a rank's batch.
        ranks: what those that were tried hold.
        output: last lines that the failed process printed, where no sentence tells the problem.
        seconds: how long all of it took.
    """

    what: str
    nodes: int
    gpus_per_node: int
    starts: bool
    problem: str = ""
    told: bool = False
    strategy: str = ""
    precision: str = ""
    axes: dict[str, int] = field(default_factory=dict)
    stages: list[list[int]] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    batch: list[list[int]] = field(default_factory=list)
    ranks: list[TriedRank] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return it for the screen."""
        size = f"{self.nodes} node(s) x {self.gpus_per_node} GPU(s)"
        if not self.starts:
            head = f"{self.what} does not start on {size}" if self.told else f"{self.what} could not be tried on {size}"
            return [f"{head}: {self.problem}", *(f"  {line}" for line in self.output)]
        product = " x ".join(f"{size} {name.replace('_', ' ')}" for name, size in self.axes.items())
        lines = [
            f"{self.what} starts on {size}, tried here in {self.seconds:.0f} s with tensors that are never written.",
            f"{self.strategy}, {self.precision}; {product} = {self.nodes * self.gpus_per_node} ranks; "
            f"a rank's batch: {', '.join(' x '.join(map(str, shape)) for shape in self.batch)}",
        ]
        lines += [
            f"stage {number}: layers {first} to {last}, {parameters:,} parameters"
            for number, (first, last, parameters) in enumerate(self.stages)
        ]
        if self.buckets:
            lines.append(f"{len(self.buckets)} bucket(s) of gradients, MiB: {', '.join(map(_mib, self.buckets))}")
        lines.append("MiB held by rank: parameters + gradients + optimizer + buffers, without activations")
        lines += [
            f"  {each.rank:>5} ({each.place}): {_mib(each.parameters)} + {_mib(each.gradients)} + "
            f"{_mib(each.optimizer)} + {_mib(each.buffers)} = {_mib(each.total)}"
            for each in self.ranks
        ]
        return lines


def try_recipe(recipe: str, overrides: Sequence[str], nodes: int, gpus_per_node: int) -> Preflight:
    """Try how a recipe starts on a number of GPUs that are not there.

    Its configuration is that of a machine with GPUs. Its data set need not be here: batches have the shapes that the
    configuration says, unless the data module is the user's own. Nothing is recorded or saved.

    Args:
        recipe: the name of a shipped recipe, or the path of a YAML file.
        overrides: Hydra's, such as `strategy.num_stages=8`.
        nodes: nodes of the job.
        gpus_per_node: GPUs of each.

    Raises:
        PlanError: the numbers make no job.
        RecipeError: there is no such recipe.
    """
    from azureml_strategy.training.recipes import find_recipe

    find_recipe(recipe)
    command = [sys.executable, "-m", "azureml_strategy.planning.pretended_recipe", recipe, *overrides]
    return _try(recipe, PretendedJob(command, nodes, gpus_per_node))


def try_command(
    command: Sequence[str], nodes: int, processes_per_node: int, distribution: str = "pytorch"
) -> Preflight:
    """Try how a script starts as a job of many ranks. It runs unchanged up to the end of its Trainer's third step.

    What it writes before that, by code of its own, it writes. Lightning's loggers and checkpoints write nothing.

    Args:
        command: such as `["python", "train.py"]`.
        nodes: nodes of the job.
        processes_per_node: processes of each.
        distribution: Azure ML's.

    Raises:
        PlanError: the numbers make no job, or there is no such program.
    """
    return _try(" ".join(command), PretendedJob(command, nodes, processes_per_node, distribution))


def _try(what: str, job: PretendedJob) -> Preflight:
    """Try the first and the last rank, whose reports name the axes; then the others that differ."""
    began = time.monotonic()
    found = try_ranks(job, sorted({0, job.ranks - 1}))
    failed = next((each for each in found.values() if "error" in each), None)
    places = {} if failed else different_ranks(found[0]["axes"])
    if not failed:
        found |= try_ranks(job, [rank for rank in places if rank not in found])
        failed = next((each for each in found.values() if "error" in each), None)
    seconds = round(time.monotonic() - began, 1)
    if failed:
        return _refused(what, job, failed["error"], seconds)
    first = found[0]
    return Preflight(
        what=what,
        nodes=job.nodes,
        gpus_per_node=job.processes_per_node,
        starts=True,
        **{name: first[name] for name in ("strategy", "precision", "axes", "stages", "buckets", "batch")},
        ranks=[TriedRank(rank, place, **found[rank]["state"]) for rank, place in places.items()],
        seconds=seconds,
    )


def _refused(what: str, job: PretendedJob, error: dict[str, Any], seconds: float) -> Preflight:
    told = bool(error["told"])
    kind = "" if told else f"{error['kind']}: " if error["kind"] else ""
    where = "" if told or not error["where"] else f" ({error['where']})"
    return Preflight(
        what=what,
        nodes=job.nodes,
        gpus_per_node=job.processes_per_node,
        starts=False,
        problem=f"{kind}{error['text']}{where}",
        told=told,
        output=[] if told else error["output"],
        seconds=seconds,
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}" if size else "0"
