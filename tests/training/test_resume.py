"""`azureml-strategy train` typed again, in the folder of a run that ended early."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from tests.training.conftest import COMMAND, TINY, files, run

from azureml_strategy.checkpoint.serialization import saved_hyperparameters

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")

SAVED = ["checkpoint=best", "checkpoint.every_n_train_steps=1", "output_dir=${hydra:runtime.cwd}/fixed"]


def test_it_goes_on_and_logs_each_step_once(store: MlflowClient) -> None:
    run_id = store.create_run(store.create_experiment("job")).info.run_id
    command = [COMMAND, "train", "resnet50_synthetic", *TINY, *SAVED, "data.steps_per_epoch=6", "trainer.max_epochs=9"]
    run(*command, "trainer.max_steps=3", variables={"MLFLOW_RUN_ID": run_id})
    assert len(files("fixed/checkpoints/*.manifest.json")) == 2
    second = run(*command, "trainer.max_steps=5", variables={"MLFLOW_RUN_ID": run_id}).stdout
    assert "Going on from" in second
    assert [metric.step for metric in store.get_metric_history(run_id, "train/loss")] == [0, 1, 2, 3, 4]
    anew = run(*command, "trainer.max_steps=1", "resume=never").stdout
    assert "Going on from" not in anew


NESTED = """\
from azureml_strategy.models import ImageClassifier


class Nested(ImageClassifier):
    def __init__(self, layers, optimizer, root, network, **others):
        super().__init__(network, **others)
        self.save_hyperparameters(ignore=["network"])

    def on_load_checkpoint(self, checkpoint):
        read, here = checkpoint["hyper_parameters"], self.hparams
        assert read.keys() == here.keys(), read
        for name in read:
            if name == "optimizer":  # no two partials are equal
                assert (read[name].func, read[name].keywords) == (here[name].func, here[name].keywords)
            else:
                assert (type(read[name]), read[name]) == (type(here[name]), here[name])
        print("The hyperparameters were read.")
"""
NESTED_SETTINGS = [
    "+model.layers={widths: [8, 4], inner: {names: [a, b], classes: '${num_classes}'}}",
    "+model.optimizer={_target_: torch.optim.SGD, _partial_: true, lr: 0.1}",
    "+model.root={_target_: pathlib.Path, _args_: [/data]}",
]


@pytest.mark.usefixtures("store")
def test_a_model_with_nested_settings() -> None:
    Path("nested.py").write_text(NESTED)
    command = [COMMAND, "train", "resnet50_synthetic", "model._target_=nested.Nested", *NESTED_SETTINGS, *TINY, *SAVED]
    run(*command, "trainer.max_steps=1", variables={"PYTHONPATH": str(Path.cwd())})
    again = run(*command, "trainer.max_steps=2", variables={"PYTHONPATH": str(Path.cwd())}).stdout
    assert "The hyperparameters were read." in again
    found = saved_hyperparameters(files("fixed/checkpoints/*.ckpt")[-1])
    assert found["layers"]["inner"] == {"names": ["a", "b"], "classes": 2}
    assert found["root"] == Path("/data")
    # Hydra's partials are of a class of its own.
    assert (type(found["optimizer"]), found["optimizer"].func) == (functools.partial, torch.optim.SGD)


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_each_emulated_job_is_a_run_of_its_own() -> None:
    emulated = [COMMAND, "emulate", "--", COMMAND, "train", "resnet50_synthetic", *TINY, *SAVED, "trainer.max_epochs=9"]
    run(*emulated, "trainer.max_steps=1")
    refused = run(*emulated, "trainer.max_steps=2", check=False)
    assert refused.returncode != 0
    assert re.search(r"is epoch=0-step=1\.ckpt of run \w+, and this is run \w+: two runs", refused.stdout)
    assert "Traceback" not in refused.stdout
    taken = run(*emulated, "trainer.max_steps=2", "resume=any").stdout
    assert "Going on from" in taken
    names = ["epoch=0-step=1", "epoch=1-step=2"]  # max_steps has cut the first epoch short
    assert files("fixed/checkpoints/*.ckpt") == [f"fixed/checkpoints/{name}.ckpt" for name in names]


@pytest.mark.usefixtures("store")
def test_a_checkpoint_that_is_not_there_is_refused_in_a_few_lines() -> None:
    done = run(COMMAND, "train", "resnet50_synthetic", *TINY, "resume=/no/such.ckpt", check=False)
    assert done.returncode == 2, done.stdout
    assert "resume=/no/such.ckpt, but there is nothing" in done.stdout
    assert "Traceback" not in done.stdout
