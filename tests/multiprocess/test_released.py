"""A checkpoint that an earlier release has written goes on here, and ends as the undisturbed training did there."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from tests.multiprocess.conftest import RunJob

from azureml_strategy.checkpoint.folder import CheckpointFolder

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

RELEASED = Path(__file__).parents[1] / "checkpoint" / "released"
ARCHIVES = sorted(RELEASED.glob("*/*.tar.xz"))


@pytest.mark.slow
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: f"{path.parent.name} {path.name.partition('.')[0]}")
def test_it_goes_on(run_job: RunJob, tmp_path: Path, archive: Path) -> None:
    copy = tmp_path / "run"
    with tarfile.open(archive) as packed:
        packed.extractall(copy, filter="data")
    (manifest,) = CheckpointFolder(copy / "checkpoints").complete()
    # The job that wrote it is restarted: what another job has written, `auto` refuses.
    strategy = archive.name.partition(".")[0]
    job = run_job("released.py", "resume", strategy, copy, nodes=2, extra={"AZUREML_RUN_ID": str(manifest.run_id)})
    assert job.exit_code == 0, job.output
    assert f"Restoring states from the checkpoint path at {copy / 'checkpoints' / manifest.name}" in job.output
    for rank, now in job.results.items():
        then = json.loads((copy / f"{rank}.json").read_text())
        assert (now["epoch"], now["step"]) == (then["epoch"], then["step"])
        assert now["weights"] == then["weights"], "restored, to the last bit"
        assert now["moments"] == pytest.approx(then["moments"], rel=1e-6)
        steps = [step for step in then["losses"] if int(step) >= manifest.step]
        # Of the step of the checkpoint itself, the last batch came before it.
        assert list(now["losses"]) == steps[1:] or list(now["losses"]) == steps
        for step in steps[1:]:
            assert now["losses"][step] == pytest.approx(then["losses"][step], rel=1e-5)
        assert now["end"] == pytest.approx(then["end"], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("release", sorted({each.parent for each in ARCHIVES}), ids=lambda folder: folder.name)
def test_a_release_has_one_of_each_kind(release: Path) -> None:
    kinds = {each.name.partition(".")[0] for each in release.iterdir()}
    assert kinds >= {"ddp", "local_sgd", "model_parallel", "pipeline", "zero_2"}
