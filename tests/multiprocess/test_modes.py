"""Layers of a pipeline train in training mode and are evaluated in evaluation mode, whoever holds them."""

from __future__ import annotations

import pytest
from tests.multiprocess.conftest import RunJob


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_pipeline_has_the_modes_of_its_module(run_job: RunJob, nodes: int) -> None:
    job = run_job("modes.py", nodes=nodes)
    assert job.exit_code == 0, job.output
    modes = {name: found for rank in range(nodes) for name, found in job.results[rank]["modes"].items()}
    layers = ["held_1", "frozen_2", "alone_3", "held_6", "frozen_7", "alone_8"]
    for layer in layers:
        trains = not layer.startswith("frozen")
        assert modes[f"fit: {layer}"] == [trains], layer
        assert modes[f"validation: {layer}"] == [False], layer
        assert modes[f"test: {layer}"] == [False], layer
    assert len(modes) == 3 * len(layers)
