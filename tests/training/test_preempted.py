"""A recipe whose node is taken away, and that ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from tests.training.conftest import COMMAND, run, the_run
from tests.training.test_gpt import SMALL

TRAIN = [COMMAND, "train", "gpt_ddp", "trainer=cpu", "trainer.devices=1", *SMALL]
# The first attempt is slow, so that its node is taken away in the middle.
SLOW = """
import time
from azureml_strategy import read_job
from lightning.pytorch import Callback

class Slow(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if read_job().attempt == 0:
            time.sleep(1)
"""


@pytest.mark.slow
def test_the_losses_are_those_of_the_undisturbed_run(store: MlflowClient, tmp_path: Path) -> None:
    run(COMMAND, "emulate", "--nodes", "2", "--", *TRAIN)
    undisturbed = the_run(store)
    store.delete_run(undisturbed.info.run_id)
    (tmp_path / "slow.py").write_text(SLOW)
    emulate = [COMMAND, "emulate", "--nodes", "2", "--preempt-after", "0s", "--preempt-notice", "30s"]
    done = run(*emulate, "--", *TRAIN, "+callbacks.slow._target_=slow.Slow", variables={"PYTHONPATH": str(tmp_path)})
    assert "node 1 was taken away" in done.stdout
    preempted = the_run(store)
    assert "Preempt of the node of rank 1, after step " in preempted.data.tags["stopped.attempt_0"]
    assert preempted.info.status == "FINISHED"
    for metric in ("train/loss", "val/loss", "val/perplexity"):
        assert history(store, preempted, metric) == history(store, undisturbed, metric), done.stdout


@pytest.mark.slow
@pytest.mark.exhaustive
def test_it_comes_back_with_one_node_and_validates_as_the_undisturbed_run(store: MlflowClient, tmp_path: Path) -> None:
    run(COMMAND, "emulate", "--nodes", "2", "--", *TRAIN)
    undisturbed = the_run(store)
    store.delete_run(undisturbed.info.run_id)
    (tmp_path / "slow.py").write_text(SLOW)
    emulate = [COMMAND, "emulate", "--nodes", "2", "--preempt-after", "0s", "--preempt-notice", "30s"]
    train = [*TRAIN, "+callbacks.slow._target_=slow.Slow"]
    done = run(*emulate, "--nodes-after", "1", "--", *train, variables={"PYTHONPATH": str(tmp_path)})
    assert "1 data-parallel rank(s) x accumulation 2" in done.stdout
    preempted = the_run(store)
    # the last batch of a step on rank 0, which is what is logged of it, has other samples than with two ranks
    steps = [[step for step, _ in history(store, each, "train/loss")] for each in (preempted, undisturbed)]
    assert steps[0] == steps[1]
    ours, theirs = (dict(history(store, each, "val/loss")) for each in (preempted, undisturbed))
    # At this learning rate Adam makes 4e-4 of the other order of float32 sums, in 30 steps without any restart.
    assert ours == pytest.approx(theirs, rel=1e-3)


def history(store: MlflowClient, run: Run, metric: str) -> list[tuple[int, float]]:
    return [(each.step, each.value) for each in store.get_metric_history(run.info.run_id, metric)]
