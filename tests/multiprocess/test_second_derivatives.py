"""A penalty on gradients is trained rightly, or refused: nothing records the collectives of a cut layer's backward."""

from __future__ import annotations

from tests.multiprocess.conftest import RunJob


def test_a_gradient_penalty_is_right_or_refused(run_job: RunJob) -> None:
    job = run_job("second_derivatives.py", processes_per_node=2)
    assert job.exit_code == 0, job.output
    for found in job.results.values():
        assert found["ddp"]["with"] != found["ddp"]["without"]
        assert isinstance(found["ddp"]["with"], list)
        for name in ("tensor parallel", "AutoTP"):
            assert found[name]["without"] == [], "layers without penalties train"
            assert "ConfigurationError: create_graph=True" in found[name]["with"]
