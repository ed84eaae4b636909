"""Composes recipes as `azureml-strategy train` does, and runs it on the smallest job that trains."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from mlflow import MlflowClient
from mlflow.entities import Run
from omegaconf import DictConfig, OmegaConf
from tests.emulator.conftest import _empty_store, store
from tests.preloaded import run_forked

from azureml_strategy.training.resolvers import register_resolvers

__all__ = ["_empty_store", "store"]  # fixtures

COMMAND = str(Path(sys.executable).with_name("azureml-strategy"))
# Two steps of ResNet-50 on two images of 32 pixels.
RESNET = [
    *("data.image_size=32", "data.batch_size=2", "data.steps_per_epoch=2", "trainer.limit_val_batches=1"),
    *("num_classes=2", "trainer.precision=32-true", "trainer.log_every_n_steps=1", "trainer.accelerator=cpu"),
]
# In place of ResNet-50, which has 100 MB to make, to send and to save, where the network is not what is shown.
_LINEAR = "{_target_: torch.nn.Linear, in_features: 3072, out_features: '${num_classes}'}"
MATRIX = [
    "model.network._target_=torch.nn.Sequential",
    f"++model.network._args_=[{{_target_: torch.nn.Flatten}}, {_LINEAR}]",
]
TINY = [*RESNET, *MATRIX]
Compose = Callable[..., DictConfig]


@pytest.fixture
def composed() -> Iterator[Compose]:
    """A recipe with overrides; what only a running application knows has a fixed value."""
    register_resolvers()
    with initialize_config_module(
        "azureml_strategy.recipes", version_base="1.3"
    ):  # which registers its own `hydra` resolver
        OmegaConf.register_new_resolver("hydra", lambda key: f"<{key}>", replace=True)
        yield lambda recipe, *overrides: compose(recipe, list(overrides))
    OmegaConf.clear_resolver("hydra")


def run(
    *command: object, check: bool = True, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one of our commands to its end; its output and its errors in one."""
    environ = {**os.environ, "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
    done = run_forked([str(part) for part in command], environ | (variables or {}), timeout=200)
    assert not check or done.returncode == 0, done.stdout
    return done


def the_run(store: MlflowClient) -> Run:
    """The only run in the store."""
    (found,) = store.search_runs([experiment.experiment_id for experiment in store.search_experiments()])
    return found


def files(pattern: str) -> list[str]:
    """What lies below this folder, by its path, in order."""
    return sorted(str(path) for path in Path().glob(pattern))
