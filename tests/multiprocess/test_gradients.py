"""Gradients in hooks are those of one process, and edits of them count, under every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.multiprocess.conftest import RunJob, scripts_on_path

Numbers = dict[str, Any]


# Strategies, or one of their cases each: stages 2 and 3 of ZeRO share code, as do FSDP2 and tensor parallelism.
SOME = (
    "ddp;zero_2 helped;zero_2 norm;zero_2 accumulating;zero_3;"
    "fsdp2;tensor_parallel helped;tensor_parallel norm;tensor_parallel value;local_sgd helped;pipeline pipeline"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, SOME, id="2"),
        *(pytest.param(ranks, "", id=f"{ranks}-all", marks=pytest.mark.exhaustive) for ranks in (1, 2, 4)),
    ],
)
def test_gradients_are_those_of_one_process(run_job: RunJob, ranks: int, cases: str) -> None:
    """Norms, clipping, edits and whole gradients, of the helpers, torch, Lightning and its hooks."""
    job = run_job("gradients.py", cases, processes_per_node=ranks)
    assert job.exit_code == 0, job.output
    with scripts_on_path():
        from gradients import CASES, oracle
    oracles = {case: oracle(kind, **arguments) for case, (kind, arguments) in CASES.items()}
    wrong = [
        f"{name}, rank {rank}, step {step}: {words}"
        for rank, results in job.results.items()
        for name, result in results.items()
        if not warned(name)
        for step, (found, expected) in enumerate(zip(result["seen"], oracles[name.split()[1]], strict=True))
        for words in differences(found, expected)
    ]
    assert wrong == []
    for rank, results in job.results.items():
        for name, result in results.items():
            looked = [each for each in result["said"] if "azureml_strategy.gradients" in each]
            assert len(looked) == (warned(name) and rank == 0), (name, rank, result["said"])
            assert not any("will not actually clip" in each for each in result["said"]), name
            if name.endswith("accumulating"):
                summed = name.startswith(("fsdp2", "tensor_parallel"))
                assert ("accumulate_grad_batches" in result["refused"]) != summed, name


def warned(name: str) -> bool:
    """Whether a hook looks for gradients where DeepSpeed has none."""
    return name.startswith(("zero", "offload")) and name.endswith("stock")


def differences(found: Numbers, expected: Numbers) -> Iterator[str]:
    """Yield what differs. A stage of a pipeline has some of the parameters, and ZeRO gradients of unused ones too."""
    for key, value in found.items():
        named = value.items() if isinstance(value, dict) else [("", value)]
        for name, number in named:
            oracle = expected[key].get(name) if name else expected[key]
            if oracle is None:
                if "unused" not in name or number != pytest.approx(
                    [0.0] * len(number) if isinstance(number, list) else 0
                ):
                    yield f"{key} has {name}"
            elif number != pytest.approx(oracle, rel=1e-5, abs=1e-7):
                yield f"{key} {name} is {number}, not {oracle}"
