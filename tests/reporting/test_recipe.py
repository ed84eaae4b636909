"""A recipe's run ends with the path of its page."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient
from tests.training.conftest import COMMAND, TINY, run, the_run


@pytest.mark.slow
def test_a_recipe_leaves_its_page(
    client: MlflowClient, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {"AZUREML_STRATEGY_PAGE": "on", "MLFLOW_TRACKING_URI": store}
    done = run(
        COMMAND, "train", "resnet50_synthetic", *TINY, "trainer.devices=1", "output_dir=out", variables=variables
    )
    assert f"What this run waited for: {Path('out/report.html').absolute()}" in done.stdout
    found = the_run(client)
    assert found.data.params["trainer/precision"] == "32-true"
    text = Path(client.download_artifacts(found.info.run_id, "report.html")).read_text()
    assert text == Path("out/report.html").read_text()
    assert 'aria-label="loss"' in text  # of training and validation
