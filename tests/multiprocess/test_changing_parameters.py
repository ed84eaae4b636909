"""Parameters that are frozen, unfrozen, added or left out while azureml_ddp trains."""

from __future__ import annotations

import pytest
from tests.multiprocess.conftest import RunJob


def test_parameters_that_change(run_job: RunJob) -> None:
    job = run_job("changing_parameters.py", nodes=2)
    assert job.exit_code == 0, job.output
    first, second = job.results[0], job.results[1]
    assert first == second
    # Each step leaves out one expert on all ranks: neither its momentum nor its decay may move it.
    for name in ("experts", "by hand", "mixed"):
        assert first[name]["parameters"] == pytest.approx(first[name]["alone"], abs=1e-5), name
    unfrozen = first["unfrozen"]
    for name in ("copies", "static_graph", "find_unused"):
        assert unfrozen[name] == pytest.approx(unfrozen["plain"], abs=1e-6), name
    assert unfrozen["bf16"] == pytest.approx(unfrozen["plain"], abs=0.1)
    assert len({tuple(unfrozen[name]) for name in ("plain", "bf16", "powersgd")}) == 3
    assert first["made"] == 3  # all parameters at the start, then two sets in turn
    assert first["held"] == [3, 4]  # of fifteen sets in turn, the last used
    exact = [False] * 4  # two steps of each set, in each training
    assert [bool(each) for each in first["sent by PowerSGD"]] == [*exact, True, True] * 2
