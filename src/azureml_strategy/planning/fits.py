"""Says whether a candidate fits: the memory of its fullest GPU beside what the GPU has."""

from __future__ import annotations

from functools import cache

from torch.optim import SGD, AdamW

from azureml_strategy.gpus import GPU
from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.footprint import Footprint, footprint_of
from azureml_strategy.planning.memory import CONTEXT, Memory, Name, Placement, memory_of
from azureml_strategy.planning.optimizer_states import OptimizerStates, optimizer_states
from azureml_strategy.planning.steps import Distribution, StrategyName
from azureml_strategy.planning.workload import Workload

_PLACEMENTS: dict[StrategyName, Name] = {
    "ddp": "ddp",
    "local_sgd": "local_sgd",
    "deepspeed_stage_1": "zero_1",
    "deepspeed_stage_2": "zero_2",
    "deepspeed_stage_3": "zero_3",
    "model_parallel": "fsdp2",
    "pipeline": "pipeline",
}


def fits(memory: Memory | None, gpu: GPU) -> bool | None:
    """Whether a GPU holds so much beside CUDA's own memory; None if the memory is not known."""
    return None if memory is None else memory.total + CONTEXT <= gpu.memory_gb * 1e9


class MemoryOf:
    """Gives the memory of a workload's fullest GPU. A module that cannot be traced has none.

    Args:
        workload: of a recipe.

    Attributes:
        unknown: why the memory is not known, in a sentence; empty if it is.
    """

    def __init__(self, workload: Workload) -> None:
        self.unknown: list[str] = []
        self._workload = workload
        self._footprints: dict[tuple[str, int], Footprint | None] = {}
        self._found: dict[tuple[str, Distribution, int], Memory | None] = {}

    def __call__(self, precision: str, how: Distribution, gpus: int) -> Memory | None:
        """The memory of the fullest of so many GPUs.

        Raises:
            PlanError: the strategy cannot place the module.
        """
        # Halves of both kinds have two bytes.
        traced = {"16-mixed": "bf16-mixed", "16-true": "bf16-true", "tf32": "32-true"}.get(precision, precision)
        key = (traced, how, gpus)
        if key not in self._found:
            self._found[key] = self._fullest(traced, how, gpus)
        return self._found[key]

    def _fullest(self, precision: str, how: Distribution, gpus: int) -> Memory | None:
        pieces = how.micro_batches if how.strategy == "pipeline" else 1
        footprint = self._footprint(precision, max(self._workload.batch_size // pieces, 1))
        if footprint is None:
            return None
        kept = _optimizer_states(self._workload.optimizer)
        stages = how.num_stages if how.strategy == "pipeline" else 1
        placements = [
            Placement(
                _PLACEMENTS[how.strategy],
                replicas=gpus // how.model_parallel_size,
                tensor_parallel=how.tensor_parallel_size,
                stages=stages,
                stage=stage,
                micro_batches=how.micro_batches,
                recompute=how.activation_checkpointing,
                accumulate=how.accumulate,
                reduce_bucket=int(how.zero_bucket),
            )
            for stage in range(stages)
        ]
        return max((memory_of(footprint, each, kept) for each in placements), key=lambda found: found.total)

    def _footprint(self, precision: str, samples: int) -> Footprint | None:
        key = (precision, samples)
        if key not in self._footprints:
            batch = self._workload.make_batch(samples)
            try:
                self._footprints[key] = footprint_of(self._workload.module, batch, precision)
            except PlanError as error:
                self._footprints[key] = None
                self.unknown.append(f"Memory is not known: {error}")
        return self._footprints[key]


@cache
def _optimizer_states(kind: str) -> OptimizerStates:
    """What the recipes' optimizers keep; on GPUs they take a step in one kernel."""
    if kind == "sgd":
        return optimizer_states(lambda parameters: SGD(parameters, 0.1, momentum=0.9, fused=True))
    return optimizer_states(lambda parameters: AdamW(parameters, fused=True))
