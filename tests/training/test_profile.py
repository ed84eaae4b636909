"""`profile` in a recipe, by the real command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from tests.training.conftest import COMMAND, run, the_run

MODULE = """
import os
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        assert "AZUREML_STRATEGY_RESUME" not in os.environ, "what this process starts would take it for its own"
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4)
"""
RECIPE = "defaults: [base_run, _self_]\nmodel: {_target_: my_tiny.Model}\ndata: {_target_: my_tiny.Data}\n"
TRAIN = [COMMAND, "train", "mine.yaml", "trainer=cpu", "trainer.max_epochs=1"]


@pytest.fixture(autouse=True)
def _recipe() -> None:
    Path("my_tiny.py").write_text(MODULE)
    Path("mine.yaml").write_text(f"{RECIPE}checkpoint: null\n")


def test_steps_and_ranks_as_people_type_them(store: MlflowClient) -> None:
    """In one folder, though rank 1 starts at another time; the page has overrides as typed, not what they refer to."""
    typed = ["output_dir='here/${now:%H%M%S%f}'", "+vars.hint=${oc.env:HINT}"]
    done = run(*TRAIN, "profile.steps=3-4", "profile.ranks=0,1", *typed, variables={"HINT": "of nobody's business"})
    (here,) = Path("here").iterdir()
    for rank in (0, 1):
        summary = json.loads((here / f"profile/summary_rank_{rank}.json").read_text())
        assert summary["steps"] == [3, 4]
        assert [each["name"] for each in summary["collectives"]].count("all_reduce") == 1
    assert done.stdout.count("Profile of steps 3-4 on rank 0") == 1
    found = the_run(store)
    assert len(store.list_artifacts(found.info.run_id, "profile")) == 4
    assert not [name for name in found.data.params if name.startswith("profile")]
    assert "${oc.env:HINT}" in str(found.data.tags)
    assert "of nobody" not in str(found.to_dictionary())


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("profile.ranks=0,8", "ranks=0,8: there is no rank 8. This run has 1 process: ranks 0 to 0."),
        ("profile.steps=4-3", "profile cannot be made. ProfileRequestError: steps=4-3 ends before it begins"),
    ],
)
def test_what_cannot_be_profiled_is_refused_before_the_start(override: str, said: str) -> None:
    done = run(*TRAIN, "trainer.devices=1", "tracking=console", override, check=False)
    assert done.returncode == 2
    assert said in done.stdout
