"""Makes of runs in an MLflow store what a calibration takes: what `predict` must be told of each, and its rate."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

from azureml_strategy.cluster.emulated import EMULATED_TAG
from azureml_strategy.gpus import GPU, find_gpu, gpu_of
from azureml_strategy.network.vm_sizes import VMSize, lookup_vm_size
from azureml_strategy.planning.calibration import Observed
from azureml_strategy.planning.candidates import own_settings, precision_on
from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.past_run import logged_recipe
from azureml_strategy.planning.predict import predict
from azureml_strategy.planning.steps import STRATEGIES, Distribution
from azureml_strategy.planning.workload import Workload, read_workload

_RATE = "summary/samples_per_second"
_MOST_WAIT = 0.1  # share of a step that waits for data, above which the rate is the loader's
_LEAST_STEPS = 20  # fewer say more of the start than of the rate
# A rate that is so many times what the GPUs compute without links is of another step, and one that is so small a part
# of what is predicted is of something sick: of Azure's clusters of 2018, the worst rate is off by 59 % (docs/plan.md).
_TOO_FAST, _TOO_SLOW = 5.0, 0.3
_NETWORKS = {"infiniband": "infiniband", "socket": "ethernet", "roce": "ethernet"}
_DIGITS = re.compile(r"[0-9a-f]{32}")


class LoggedRun(Protocol):
    """A run as its store has it. Texts may hold anything."""

    @property
    def run_id(self) -> str:
        """The run's id."""

    @property
    def name(self) -> str:
        """The run's name."""

    @property
    def status(self) -> str:
        """MLflow's word, such as FINISHED."""

    @property
    def tags(self) -> Mapping[str, str]:
        """By name."""

    @property
    def params(self) -> Mapping[str, str]:
        """By name."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last value of each metric."""


def observe_runs(runs: Sequence[LoggedRun], recipe: str = "") -> tuple[list[Observed], list[str]]:
    """Read what can be calibrated on.

    Args:
        runs: of recipes.
        recipe: file of a recipe of one's own, of which runs may be; a run knows the name of its recipe alone.

    Returns:
        The runs that can be used, and a sentence for each that cannot.
    """
    found: dict[str, Observed] = {}
    left_out = []
    workload_of = cache(read_workload)  # runs of one recipe differ in their places, most of the time
    for run in runs:
        if run.run_id in found:
            left_out.append(f"{run.run_id} is named twice and counts once.")
            continue
        try:
            found[run.run_id] = _observe(run, recipe, workload_of)
        except PlanError as reason:
            left_out.append(f"{run.run_id} is left out: {reason}")
    return list(found.values()), left_out


def _observe(run: LoggedRun, recipe: str, workload_of: Callable[[str, tuple[str, ...]], Workload]) -> Observed:
    if run.status != "FINISHED":
        raise PlanError(f"it is {run.status.lower()}, and only the end of a run says how fast it was.")
    if run.tags.get(EMULATED_TAG) == "true":
        raise PlanError("its nodes were emulated on one machine.")
    size, gpu = _place(run)
    measured = _rate(run)
    nodes, devices = _whole(run, "summary/nodes"), _whole(run, "summary/devices")
    if devices % nodes:
        raise PlanError(f"it logged {devices} devices on {nodes} nodes, which do not have as many each.")
    workload = workload_of(*logged_recipe(run.tags, run.params, recipe))
    if run.tags.get("throughput.unit", workload.unit) != workload.unit:
        raise PlanError(f"it counted {run.tags['throughput.unit']}, and its recipe counts {workload.unit}.")
    arguments: dict[str, Any] = {
        "network": workload.network,
        "batch_size": workload.batch_size,
        "gpu": gpu.name,
        "vm_size": size.name if size else None,
        "nodes": nodes,
        "gpus_per_node": devices // nodes,
        "precision": precision_on(workload, gpu),
        "compiled": run.tags.get("azureml_strategy.compiled") == "true",
        "strategy": _distribution(workload, devices),
        "optimizer": workload.optimizer,
        "interconnect": _NETWORKS.get(run.tags.get("network.transport", "")) if nodes > 1 else None,
    }
    rate = measured / workload.per_sample
    _check_rate(rate, arguments)
    # The ids of MLflow itself are 32 digits, those of Azure ML are names.
    return Observed(run.run_id[:8] if _DIGITS.fullmatch(run.run_id) else run.run_id, arguments, rate)


def _rate(run: LoggedRun) -> float:
    """What it counted a second on all devices."""
    found = run.metrics.get(_RATE)
    if found is None:
        raise PlanError(f"it logged no {_RATE}, which RunReport writes at the end, once steps follow the warm-up.")
    if not 0 < found < math.inf:
        raise PlanError(f"it logged {found:g} as {_RATE}.")
    steps = run.metrics.get("summary/steps", 0.0)
    if not steps >= _LEAST_STEPS:
        raise PlanError(
            f"it measured {steps:g} steps (summary/steps), and {_LEAST_STEPS} are the least to trust a rate."
        )
    waited = run.metrics.get("summary/data_wait_share", 0.0)
    if not waited <= _MOST_WAIT:
        raise PlanError(f"it waited for data in {waited:.0%} of its steps' time: its rate is that of the loader.")
    return found


def _whole(run: LoggedRun, name: str) -> int:
    found = run.metrics.get(name, math.nan)
    if not 1 <= found < 1e6 or found != int(found):
        raise PlanError(f"it logged {'no' if name not in run.metrics else f'{found:g} as'} {name}.")
    return int(found)


def _place(run: LoggedRun) -> tuple[VMSize | None, GPU]:
    """The VM size, if the run was a job, and the GPU."""
    device = run.tags.get("azureml_strategy.device", "")
    if device == "cpu" or run.params.get("trainer/accelerator") == "cpu":
        raise PlanError("it ran on a CPU.")
    name = run.tags.get("azureml_strategy.vm_size") or run.tags.get("network.vm_size")
    try:
        size = lookup_vm_size(name) if name else None
    except LookupError as error:
        raise PlanError(str(error)) from error
    gpu = find_gpu(device) if device else gpu_of(size) if size else None
    if gpu is None:
        seen = device or (size.name if size else "")
        raise PlanError(f"its GPU is not known ({seen!a})." if seen else "it names neither its GPU nor its VM size.")
    return size, gpu


def _distribution(workload: Workload, devices: int) -> Distribution:
    if workload.strategy not in STRATEGIES:
        if devices > 1:
            raise PlanError(f"its strategy, {workload.strategy}, is not planned.")
        return Distribution(accumulate=workload.accumulate)
    return replace(own_settings(workload, workload.strategy), accumulate=workload.accumulate)


def _check_rate(rate: float, arguments: Mapping[str, Any]) -> None:
    expected = predict(**arguments)
    alone = expected.samples_per_second * expected.step_s / expected.compute_s  # what links make slower
    seen = f"it logged {rate:,.4g} samples/s where {expected.samples_per_second:,.4g} are expected."
    if rate >= _TOO_FAST * alone:
        raise PlanError(f"{seen} So large a difference has another cause than the planner's numbers.")
    if rate < _TOO_SLOW * expected.samples_per_second:
        raise PlanError(
            f"{seen} Below {_TOO_SLOW} of it a machine, a link or the data is at fault rather than the planner's "
            "numbers: `azureml-strategy report` says what its steps waited for."
        )
