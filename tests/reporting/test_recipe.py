"""A recipe's run ends with the path of its page."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient
from tests.training.conftest import COMMAND, TINY, run, the_run


@pytest.mark.slow
def test_a_job_of_two_nodes_leaves_its_page_and_ends_with_its_path(
    client: MlflowClient, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {"AZUREML_STRATEGY_PAGE": "on", "MLFLOW_TRACKING_URI": store}
    job = [COMMAND, "emulate", "--nodes", "2", "--", COMMAND, "train", "resnet50_synthetic", "strategy=ddp", *TINY]
    done = run(*job, "checkpoint=best", "output_dir=out", variables=variables)
    page = Path("out/report.html").absolute()
    assert done.stdout.rstrip().splitlines()[-1].endswith(f"What this run waited for: {page}")
    assert done.stdout.count("Checkpoints: ") == 1
    found = the_run(client)
    assert found.data.params["trainer/precision"] == "32-true"
    assert found.data.tags["azureml_strategy.optimizer"] == "SGD"
    text = Path(client.download_artifacts(found.info.run_id, "report.html")).read_text()
    assert text == page.read_text()
    assert 'aria-label="loss"' in text  # of training and validation
