"""The rate to expect of a recipe's run on given nodes, in the unit that the run itself measures."""

from __future__ import annotations

from collections.abc import Sequence

from azureml_strategy.gpus import gpu_of
from azureml_strategy.network.vm_sizes import VMSize
from azureml_strategy.planning.candidates import best_precision, predict_own
from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.uncounted import refuse_uncounted
from azureml_strategy.planning.workload import read_workload
from azureml_strategy.tracking.expected import ExpectedRate

# Fewer images do not fill a GPU, and are planned up to three times too fast (docs/plan.md).
_LEAST_IMAGES = 32


def expect_rate(recipe: str, overrides: Sequence[str], size: VMSize, nodes: int) -> ExpectedRate:
    """Predict the rate of a recipe with its own strategy and settings, on all GPUs of so many nodes.

    Only what the planner knows well enough to hold a run against it: no code of the user's runs.

    Args:
        recipe: name of a shipped recipe, or path of a YAML file.
        overrides: overrides of one run.
        size: of the nodes.
        nodes: number of nodes.

    Raises:
        PlanError: the recipe, its classes, a setting or its strategy cannot be planned, the batch is small, or the GPU
            is not known, or one of AMD's, whose data sheets alone are.
    """
    gpu = gpu_of(size)
    if gpu is None or gpu.driver.startswith("AMD"):
        raise PlanError(f"{size.name} has no GPU whose rates are known.")
    workload = read_workload(recipe, overrides, only_ours=True)
    if workload.network.family == "convolutional" and workload.batch_size < _LEAST_IMAGES:
        raise PlanError(f"Batches of {workload.batch_size} are planned too fast. Give {_LEAST_IMAGES} or more.")
    how, found = predict_own(workload, size, nodes)
    refuse_uncounted(workload.uncounted)
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
