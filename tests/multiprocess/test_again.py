"""What one training leaves to the next: modules that are trained again, and what is freed."""

from __future__ import annotations

import pytest
from tests.multiprocess.conftest import RunJob
from tests.situations.running import LAYOUTS


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_module_is_trained_again(run_job: RunJob, nodes: int) -> None:
    job = run_job("again.py", nodes=nodes)
    assert job.exit_code == 0, job.output
    for ddp, fsdp2 in zip(job.each("ddp"), job.each("fsdp2"), strict=True):
        assert fsdp2["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
        assert fsdp2["losses"][0] != fsdp2["losses"][-1]
        assert fsdp2["in_shards"] == [True] * 4


def of_mesh(layout: str) -> int:
    return int(layout in ("fsdp2", "tensor_parallel"))


@pytest.mark.parametrize(
    ("trainings", "layouts"),
    [
        pytest.param(1, [each for each in LAYOUTS if each != "zero_1"], id="one of each kind"),
        pytest.param(2, list(LAYOUTS), id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_nothing_of_a_training_outlives_it(run_job: RunJob, trainings: int, layouts: list[str]) -> None:
    """Hooks of a first engine would take part in a second training, and keep the optimizer's state on the GPU."""
    job = run_job("let_go.py", trainings, *layouts, nodes=2)
    assert job.exit_code == 0, job.output
    for left in job.each("left"):
        assert left == {layout: {"hooks": 0, "alive": []} for layout in layouts}
    assert job.each("error") == ["ValueError: an error of the user's"] * 2
    # Each of NCCL's holds memory of the GPU until the process ends. DTensors of a former training use those of a mesh.
    for groups in job.each("groups"):
        assert groups == {layout: [of_mesh(layout)] * trainings for layout in layouts}
    # That of a model made in configure_model is the GPU, on which no generator of the user's shuffles.
    for loaders in job.each("loaders"):
        assert loaders == dict.fromkeys(loaders, "cpu")
