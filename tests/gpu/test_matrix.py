"""The matrix of `make test-gpu` on CPUs: what trains under stock Lightning trains under each strategy of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gpu.agreement import judge, table
from tests.gpu.matrix import LAYOUTS, cells, left, read
from tests.multiprocess.conftest import RunJob, _empty_store, run_job

__all__ = ["_empty_store", "run_job"]  # fixtures
SCRIPT = Path(__file__).with_name("matrix.py")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [("--few",), pytest.param((), marks=pytest.mark.exhaustive)], ids=["few", "all"])
def test_cells_agree_with_stock_lightning(run_job: RunJob, tmp_path: Path, options: tuple[str, ...]) -> None:
    chosen, jobs = cells(list(LAYOUTS), "cpu", few=bool(options)), {}
    for world in (1, 2):
        folder = tmp_path / str(world)
        for _ in range(20):  # a cell that fails ends its job
            job = run_job(SCRIPT, folder, *options, nodes=world, extra={"AZUREML_STRATEGY_HANG_WATCH": "off"})
            jobs[world] = read(folder, world)
            if not left(chosen, jobs[world]):
                break
        assert any(jobs[world]), job.output
    verdicts = judge(jobs, chosen)
    assert all(verdict.right for verdict in verdicts), "\n" + table(verdicts)
