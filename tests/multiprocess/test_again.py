"""azureml_model_parallel: one module in several runs, with steps that call its layers and not itself."""

from __future__ import annotations

import pytest
from tests.multiprocess.conftest import RunJob


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_module_is_trained_again(run_job: RunJob, nodes: int) -> None:
    job = run_job("again.py", nodes=nodes)
    assert job.exit_code == 0, job.output
    for ddp, fsdp2 in zip(job.each("ddp"), job.each("fsdp2"), strict=True):
        assert fsdp2["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
        assert fsdp2["losses"][0] != fsdp2["losses"][-1]
        assert fsdp2["in_shards"] == [True] * 4
