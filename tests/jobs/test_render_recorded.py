"""Every recipe on representative sizes, compared with recorded text, and loaded back by azure-ai-ml.

To record anew after a change that is meant: `RECORD_JOBS=1 pytest tests/jobs/test_render_recorded.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from azure.ai.ml import load_job
from tests.jobs.rendering import cache

from azureml_strategy.jobs import job_yaml, render_job
from azureml_strategy.training.recipes import shipped_recipes

__all__ = ["cache"]  # a fixture

RECORDED = Path(__file__).parent / "recorded"
CLUSTERS = (
    ["cluster=nc24ads_a100_v4"],
    ["cluster=nd96amsr_a100_v4", "cluster.num_nodes=4"],
    ["cluster=nd96isr_h100_v5", "cluster.num_nodes=2", "cluster.tier=low_priority", "job.distribution=mpi"],
    ["cluster=nc4as_t4_v3", "cluster.tier=low_priority", "cluster.compute=serverless"],
)


@pytest.mark.parametrize("recipe", [each.name for each in shipped_recipes() if each.name != "base_run"])
def test_the_job_of_a_recipe(recipe: str, tmp_path: Path) -> None:
    texts = []
    for number, cluster in enumerate(CLUSTERS):
        text = job_yaml(render_job(recipe, cluster))
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        loaded = load_job(file)
        assert loaded.command == yaml.safe_load(text)["command"]
        assert job_yaml(loaded) == text
        build = loaded.environment.build.path
        texts.append(text.replace(str(build), "BUILD_FOLDER"))
    together = "---\n".join(texts)
    record = RECORDED / f"{recipe}.yaml"
    if os.environ.get("RECORD_JOBS"):
        record.write_text(together)
    assert together == record.read_text()
