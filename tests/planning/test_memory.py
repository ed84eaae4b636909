"""The plan of memory beside what real trainings take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.emulated import SHARED_MACHINE, free_port
from tests.planning.measured import Case, batch_of, module_of
from torch import nn

from azureml_strategy.cluster.emulated import without_job_variables
from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.footprint import Footprint, footprint_of
from azureml_strategy.planning.memory import Placement, memory_of
from azureml_strategy.planning.optimizer_states import OptimizerStates, optimizer_states

SCRIPT = Path(__file__).with_name("measured.py")
# The table of rotary angles is kept, and so are counts and the last loss.
BESIDE = 40_000
# Cases that miss the target of 10 %, and by how much at most: they may not get worse (docs/plan.md).
MISSES = {
    "zero_1-resnet50-2": 0.12,
    "zero_3-resnet50-2": 0.14,
    "fsdp2-resnet50-1": 0.2,
    "pipeline-resnet50-2": 0.17,
}
# DeepSpeed's engine of a pipeline on one rank holds 0.1 to 0.3 MB more, not found out of what.
ENGINE = 300_000
ADAM = OptimizerStates("AdamW", 8.0, 4.0, 4.0, together=False)


def measure(case: Case, folder: Path) -> list[dict[str, Any]]:
    """Train in as many processes as the case has ranks, and return what each has written."""
    results, port = folder / "measured", free_port()
    processes = []
    for rank in range(case.ranks):
        environ = {**without_job_variables(os.environ), **SHARED_MACHINE, "DS_ACCELERATOR": "cpu"}
        if case.ranks > 1:  # as torchrun sets them: in a job of Azure ML, callbacks of ours would keep tensors too
            environ |= {"RANK": str(rank), "WORLD_SIZE": str(case.ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            environ |= {"GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": str(case.ranks), "NODE_RANK": str(rank)}
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "measured"}
        command = [sys.executable, str(SCRIPT), json.dumps(asdict(case)), str(results)]
        processes.append(
            subprocess.Popen(
                command, env=environ, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return [json.loads(Path(f"{results}.{rank}").read_text()) for rank in range(case.ranks)]


def check(case: Case, folder: Path) -> None:
    batch = sum(tensor.nbytes for tensor in batch_of(case))
    for each in measure(case, folder):
        measured, planned = each["measured"], each["planned"]
        beside = BESIDE + batch + (ENGINE if (case.strategy, case.ranks) == ("pipeline", 1) else 0)
        assert planned["resident"] == pytest.approx(measured["resident"], abs=beside)
        name = f"{case.strategy}-{case.model}-{case.ranks}"
        assert planned["allocated"] == pytest.approx(measured["peak"], rel=MISSES.get(name, 0.1))


@pytest.fixture(scope="module")
def tiny() -> Footprint:
    case = Case("gpt_tiny", "ddp")
    return footprint_of(module_of(case), batch_of(case))


@pytest.mark.parametrize("case", [Case("gpt_tiny", "fsdp2", 2)], ids=str)
def test_sharded_trainings(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", ["gpt_tiny", "resnet50"])
@pytest.mark.parametrize("strategy", ["ddp", "zero_1", "zero_2", "zero_3", "fsdp2", "pipeline"])
def test_trainings(model: str, strategy: str, ranks: int, tmp_path: Path) -> None:
    check(Case(model, strategy, ranks, size=64 if model == "resnet50" else 0), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["zero_3", "fsdp2"])
def test_trainings_with_a_frozen_block(strategy: str, tmp_path: Path) -> None:
    check(Case("gpt_tiny", strategy, 2, frozen=True), tmp_path)


def test_a_tied_parameter_counts_once(tiny: Footprint) -> None:
    module = module_of(Case("gpt_tiny", "ddp"))
    module.configure_model()
    assert tiny.elements == sum(each.numel() for each in module.parameters())
    assert sum(phase.gradients for phase in tiny.phases) == tiny.trainable


def test_what_is_kept_is_what_autograd_saves(tiny: Footprint) -> None:
    """The same step on real tensors, whose storages are counted by another hook."""
    case = Case("gpt_tiny", "ddp")
    module, batch = module_of(case), batch_of(case)
    module.configure_model()
    own = {each.untyped_storage().data_ptr() for each in module.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = module.training_step(batch, 0)
    last = next(phase for phase in tiny.phases if phase.backward)
    assert last.start == pytest.approx(sum(saved.values()), rel=0.03)
    assert loss.ndim == 0


def test_a_trace_leaves_nothing_behind() -> None:
    case = Case("gpt_tiny", "ddp")
    module, batch = module_of(case), batch_of(case)
    module.configure_model()
    footprint_of(module, batch)
    loss = module.training_step(batch, 0)
    assert type(loss) is torch.Tensor
    assert loss.item() > 0
    assert not any(each._forward_hooks for each in module.modules())


def test_frozen_parameters_have_no_gradients() -> None:
    case = Case("gpt_tiny", "ddp", frozen=True)
    footprint = footprint_of(module_of(case), batch_of(case))
    frozen = footprint.units[1].elements
    assert footprint.trainable == footprint.elements - frozen
    memory = memory_of(footprint, Placement("ddp"), ADAM)
    assert memory.gradients == 4 * footprint.trainable
    assert memory.optimizer == pytest.approx(8 * footprint.trainable, rel=1e-3)


def test_integer_buffers_and_plain_modules() -> None:
    footprint = footprint_of(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), torch.empty(16, 8, device="meta"))
    assert footprint.buffers == 4 * 4 * 2 + 8
    assert footprint.elements == 8 * 4 + 4 + 4 + 4


def test_the_table_that_buffers_are_hashed_with() -> None:
    """Two ranks keep one of 2^16 integers, if there are buffers besides the statistics of a normalisation."""
    image = footprint_of(module_of(Case("resnet50", "zero_1", size=64)), batch_of(Case("resnet50", "zero_1", size=64)))
    norm = footprint_of(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), torch.empty(16, 8, device="meta"))
    for footprint, table in ((image, 8 * 2**16), (norm, 0)):
        alone, two = (memory_of(footprint, Placement("zero_1", replicas=each), ADAM) for each in (1, 2))
        assert two.parameters - alone.parameters == table


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_shares_add_up_to_the_whole(tiny: Footprint, replicas: int) -> None:
    memory = memory_of(tiny, Placement("zero_2", replicas=replicas, reduce_bucket=1000), ADAM)
    assert memory.optimizer * replicas == pytest.approx(12 * tiny.trainable, rel=1e-3)
    assert memory.parameters == 4 * tiny.elements


def test_stages_hold_all_layers(tiny: Footprint) -> None:
    """A tied table is in the first and in the last stage."""
    stages = [memory_of(tiny, Placement("pipeline", stages=2, stage=stage), ADAM) for stage in range(2)]
    table = 4 * 256 * 128
    assert sum(each.parameters for each in stages) == 4 * tiny.elements + table


@pytest.mark.parametrize(
    ("make", "each", "a_tensor"),
    [
        (lambda parameters: torch.optim.AdamW(parameters), 8, 4),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 4, 0),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), 0, 0),
        (lambda parameters: torch.optim.Adam(parameters, amsgrad=True), 12, 4),
    ],
)
def test_what_optimizers_keep(make: Any, each: int, a_tensor: int) -> None:
    states = optimizer_states(make)
    assert (states.each, states.a_tensor, states.together) == (each, a_tensor, True)


def test_activation_checkpointing_keeps_inputs(tiny: Footprint) -> None:
    placement = Placement("fsdp2", replicas=2)
    whole, less = (memory_of(tiny, each, ADAM) for each in (placement, replace(placement, recompute=True)))
    assert less.activations < whole.activations / 2
    assert less.resident == whole.resident


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"strategy": "fsdp"}, "'fsdp' is unknown"),
        ({"strategy": "ddp", "stages": 2}, "needs strategy='pipeline'"),
        ({"strategy": "zero_3", "recompute": True}, "checkpoint_activations=true"),
        ({"strategy": "zero_3", "tensor_parallel": 2}, "cuts no matrices"),
        ({"strategy": "ddp", "replicas": 0}, "Give 1 or more"),
    ],
)
def test_what_a_strategy_cannot_do(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Placement(**arguments)


def test_too_many_stages_and_no_chain(tiny: Footprint) -> None:
    with pytest.raises(PlanError, match="num_stages"):
        memory_of(tiny, Placement("pipeline", stages=20), ADAM)
    plain = footprint_of(nn.Linear(8, 4), torch.empty(2, 8))
    with pytest.raises(PlanError, match="no chain of layers"):
        memory_of(plain, Placement("pipeline", stages=2), ADAM)


def test_a_step_that_reads_values() -> None:
    class Branches(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs if inputs.sum().item() > 0 else -inputs

    with pytest.raises(PlanError, match="cannot be traced without values"):
        footprint_of(Branches(), torch.empty(2, 8))


def test_text_names_the_parts(tiny: Footprint) -> None:
    text = memory_of(tiny, Placement("ddp", replicas=2), ADAM).text()
    assert "in the forward" in text
    assert "activations" in text
