"""What callbacks, savers, scalers and hooks keep is after a break what it is without one, under every strategy."""

from __future__ import annotations

from typing import Any

import pytest
from tests.multiprocess.conftest import RunJob

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

RANKS = [pytest.param(1, marks=pytest.mark.exhaustive), 2]
MORE = (
    "ddp;tensor_parallel;local_sgd;zero_1;zero_2;pipeline;ddp, by hand;zero_2, by hand;zero_3, by hand;fsdp2, by hand;"
    "ddp, by hand twice;zero_1, bf16"
)
CASES = [
    "fsdp2;zero_3;ddp, loss scale",
    pytest.param(MORE, marks=pytest.mark.exhaustive),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nodes", RANKS)
@pytest.mark.parametrize("cases", CASES)
def test_a_break_changes_nothing(run_job: RunJob, cases: str, nodes: int) -> None:
    job = run_job("kept_state.py", cases, nodes=nodes)
    assert job.exit_code == 0, job.output
    for found in job.results.values():
        for each in found.values():
            assert (each["whole"].pop("began at"), each["resumed"].pop("began at")) == (0, 4)
    wrong = [
        f"{name}, rank {rank}, {words}"
        for rank, found in job.results.items()
        for name in found
        for words in differences(found[name]["resumed"], found[name]["whole"])
    ]
    assert not wrong, "\n".join(wrong)


def differences(found: Any, wanted: Any, where: str = "") -> list[str]:
    """Where two structures differ, by the keys that lead there."""
    if isinstance(wanted, dict) and isinstance(found, dict) and found.keys() == wanted.keys():
        return [words for key in wanted for words in differences(found[key], wanted[key], f"{where}/{key}")]
    return [] if found == wanted else [f"{where}: {str(found)[:200]} instead of {str(wanted)[:200]}"]
