"""Models that are built in configure_model under ZeRO-3 start from, and train to, what transformers alone does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.multiprocess.conftest import RunJob, scripts_on_path

pytest.importorskip("transformers")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    "models",
    [
        pytest.param(("gpt2", "nanogpt", "llama_from_pretrained", "mixtral_loaded"), id="one of each kind"),
        pytest.param((), id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_models_train_as_by_transformers_alone(run_job: RunJob, nodes: int, models: tuple[str, ...]) -> None:
    job = run_job("zero_huggingface.py", *models, nodes=nodes)
    assert job.exit_code == 0, job.output
    oracle, ranks = job.results[0]["oracle"], job.each("losses")
    assert oracle["gpt2"][0] == pytest.approx(4.85, abs=0.1), "the logarithm of 128 tokens: it knows nothing yet"
    names = oracle.keys()
    means = {name: [sum(each) / nodes for each in zip(*(rank[name] for rank in ranks), strict=True)] for name in names}
    assert means == {name: pytest.approx(losses, rel=1e-5) for name, losses in oracle.items()}
    assert job.each("after") == [False] * nodes, "transformers builds whole models again, after runs that failed too"
    for message in job.each("other_shape"):
        assert "size mismatch for" in message, "on all ranks, though rank 0 alone compares"
    for rank in job.each("new_head"):
        assert rank["embedding"] == rank["expected"]
        assert rank["head"] == job.results[0]["new_head"]["head"]
        assert float(torch.tensor(rank["head"]).std()) == pytest.approx(0.02, rel=0.3)


@pytest.mark.parametrize("nodes", [1, 2])
def test_fabric_builds_and_loads_the_weights_of_one_process(run_job: RunJob, tmp_path: Path, nodes: int) -> None:
    with scripts_on_path():
        from families import make_model

        make_model("gpt2").save_pretrained(tmp_path / "gpt2")
    job = run_job("fabric_zero_huggingface.py", tmp_path / "gpt2", nodes=nodes)
    assert job.exit_code == 0, job.output
    for rank in job.results.values():
        assert rank["built"] == pytest.approx(rank["whole"], rel=1e-6)
        assert rank["loaded"] == pytest.approx(rank["whole"], rel=1e-6)
        assert rank["held"] == pytest.approx(1 / nodes, abs=0.01)
        assert not rank["after"]
