"""Gradients in hooks are those of one process, and edits of them count, under every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.multiprocess.conftest import RunJob, scripts_on_path

Numbers = dict[str, Any]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_are_those_of_one_process(run_job: RunJob, ranks: int) -> None:
    job = run_job("gradients.py", processes_per_node=ranks)
    assert job.exit_code == 0, job.output
    with scripts_on_path():
        from gradients import Helped, InParts, fit
    oracles = {"whole": fit(Helped()), "pipeline": fit(InParts())}
    wrong = [
        f"{name}, rank {rank}, step {step}: {words}"
        for rank, results in job.results.items()
        for name, seen in results.items()
        for step, (found, expected) in enumerate(zip(seen, oracles[kind_of(name)], strict=True))
        for words in differences(found, expected)
    ]
    assert wrong == []


def kind_of(name: str) -> str:
    return "pipeline" if name.startswith("pipeline") else "whole"


def differences(found: Numbers, expected: Numbers) -> Iterator[str]:
    """Yield what differs. A stage of a pipeline has some of the parameters, and ZeRO gradients of unused ones too."""
    for key, value in found.items():
        named = value.items() if isinstance(value, dict) else [("", value)]
        for name, number in named:
            oracle = expected[key] if not name else expected[key].get(name)
            if oracle is None:
                if "unused" not in name or number != pytest.approx(
                    [0.0] * len(number) if isinstance(number, list) else 0
                ):
                    yield f"{key} has {name}"
            elif number != pytest.approx(oracle, rel=1e-5, abs=1e-7):
                yield f"{key} {name} is {number}, not {oracle}"
