"""A Hydra application of the user's own starts from our recipes, with nothing but the package installed."""

from __future__ import annotations

from pathlib import Path

from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from mlflow import MlflowClient
from tests.training.conftest import COMMAND, TINY, _empty_store, files, run, store, the_run

__all__ = ["_empty_store", "store"]  # fixtures

APPLICATION = """
import hydra
from azureml_strategy.training import train

@hydra.main(version_base="1.3", config_path="settings", config_name="mine")
def main(config):
    metrics = train(config)
    print("returned", sorted(metrics), config.data.seed)

main()
"""


def test_hydra_finds_the_plugin() -> None:
    found = Plugins.instance().discover(SearchPathPlugin)
    assert "hydra_plugins.azureml_searchpath.AzureMLSearchPath" in [
        f"{each.__module__}.{each.__name__}" for each in found
    ]


def test_an_application_of_the_users_in_an_emulated_job(tmp_path: Path, store: MlflowClient) -> None:
    settings = tmp_path / "app" / "settings"
    (settings / "data").mkdir(parents=True)
    (settings / "mine.yaml").write_text("defaults: [resnet50_synthetic, {override data: own}, _self_]\nseed: 7\n")
    # Theirs may build on ours, which it does not hide.
    (settings / "data" / "own.yaml").write_text("# @package _global_\ndefaults: [synthetic]\ndata: {seed: 9}\n")
    (tmp_path / "app" / "my_app.py").write_text(APPLICATION)
    done = run(COMMAND, "emulate", "--nodes", "2", "--", "python", "app/my_app.py", *TINY)
    job = the_run(store)
    assert job.info.status == "FINISHED"
    assert files("**/.hydra") == [f"outputs/{job.info.run_id}/.hydra"]
    assert files("outputs/*") == [f"outputs/{job.info.run_id}"]
    assert job.data.params["seed"] == "7"
    assert "train/loss" in job.data.metrics
    for rank in (0, 1):
        start = f"[rank {rank}, node {rank}] returned "
        (returned,) = [line for line in done.stdout.splitlines() if line.startswith(start)]
        assert "'val/top1'" in returned
        assert returned.endswith(" 9")
