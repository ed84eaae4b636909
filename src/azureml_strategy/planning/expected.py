"""The rate to expect of a recipe's run on given nodes, in the unit that the run itself measures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from azureml_strategy.gpus import gpu_of
from azureml_strategy.network.vm_sizes import VMSize
from azureml_strategy.planning.candidates import best_precision, predict_own
from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.workload import read_workload
from azureml_strategy.tracking.expected import ExpectedRate

_OWN = "azureml_strategy.models."
_WITH_WEIGHTS = "FineTuner"


def has_own_network(targets: Iterable[str]) -> bool:
    """Whether a recipe's network is made of this package's classes alone, and needs no weights.

    Such a network can be built anywhere at once: nothing is loaded, and no code of the user's runs.

    Args:
        targets: each `_target_` of the recipe's section `model`.
    """
    named = list(targets)
    return bool(named) and all(each.startswith(_OWN) and not each.endswith(_WITH_WEIGHTS) for each in named)


def expect_rate(recipe: str, overrides: Sequence[str], size: VMSize, nodes: int) -> ExpectedRate:
    """Predict the rate of a recipe with its own strategy and settings, on all GPUs of so many nodes.

    Args:
        recipe: name of a shipped recipe, or path of a YAML file.
        overrides: overrides of one run.
        size: of the nodes.
        nodes: number of nodes.

    Raises:
        PlanError: the recipe, or its strategy, cannot be planned, or the GPU is not known.
    """
    workload = read_workload(recipe, overrides)
    how, found = predict_own(workload, size, nodes)
    gpu = gpu_of(size)
    if gpu is None:
        raise PlanError(f"{size.name} has no GPU whose peaks are known.")
    per_step = workload.batch_size * how.accumulate * found.gpus / how.model_parallel_size
    return ExpectedRate(
        samples_per_second=found.samples_per_second * workload.per_sample,
        low=found.low * workload.per_sample,
        high=found.high * workload.per_sample,
        unit=workload.unit,
        samples_per_step=per_step * workload.per_sample,
        vm_size=size.name,
        gpu=gpu.model,
        nodes=nodes,
        devices=found.gpus,
        strategy=str(workload.settings.get("_target_", "")).rpartition(".")[2],
        precision=workload.precision or best_precision(gpu),
    )
