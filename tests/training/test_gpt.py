"""The GPT recipes as a user types them, on the smallest job that trains."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from tests.training.conftest import COMMAND, Compose, run, the_run

from azureml_strategy.checkpoint.folder import CheckpointFolder

SMALL = [
    *("model.network.layers=1", "model.network.width=32", "model.network.heads=2", "model.network.mlp_width=48"),
    *("model.network.context=32", "model.warmup_steps=3", "model.learning_rate=1e-2", "trainer.precision=32-true"),
    *("trainer.max_steps=30", "trainer.val_check_interval=15", "data.cache=cache"),
    *("trainer.log_every_n_steps=1", "trainer.limit_val_batches=2"),
]


# Notes the losses of each job of a sweep.
CALLBACK = """
import json
from lightning.pytorch import Callback


class Record(Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def on_fit_end(self, trainer, module):
        with open("losses.jsonl", "a") as file:
            file.write(json.dumps([type(trainer.strategy).__name__, trainer.world_size, self.losses]) + "\\n")
"""
STRATEGIES = {
    "one of each kind": ("ddp", "diloco", "deepspeed_stage_3", "model_parallel", "pipeline"),
    "the others": ("ddp", "local_sgd", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3_offload"),
}


def tokens_of_a_step(store: MlflowClient, run: Run) -> float:
    """By its rate and its median, in the window in which the machine held up the fewest steps."""
    names = ("samples_per_second", "step_time_median_s")
    rates, medians = ([m.value for m in store.get_metric_history(run.info.run_id, f"throughput/{n}")] for n in names)
    return max(rate * median for rate, median in zip(rates, medians, strict=True))


def test_two_nodes_learn_from_the_standard_library_and_count_tokens(store: MlflowClient) -> None:
    train = [COMMAND, "train", "gpt_ddp", "trainer=cpu", "trainer.devices=1", *SMALL]
    output = run(COMMAND, "emulate", "--nodes", "2", "--", *train).stdout
    table = output.partition("+--")[2]
    assert re.search(r"tokens/s +\| +[\d,]+\.\d", table), output
    assert "val/perplexity" in table
    mine = the_run(store)
    losses = [metric.value for metric in store.get_metric_history(mine.info.run_id, "train/loss")]
    assert losses[-1] < losses[0] - 0.5
    assert {"val/loss", "val/perplexity"} <= mine.data.metrics.keys()
    rate = mine.data.metrics["summary/samples_per_second"]
    tokens = 2 * 8 * 32  # two ranks, batches of 8, sequences of 32
    assert 0.3 < tokens_of_a_step(store, mine) / tokens < 3, "of all ranks, and in tokens"
    assert mine.data.metrics["summary/samples_per_second_per_device"] == pytest.approx(rate / 2)


@pytest.mark.usefixtures("store")
def test_two_ranks_without_a_validation_keep_their_last_step_and_go_on_from_it() -> None:
    """The recipe ranks by val/loss, which nobody logs here."""
    few = ["trainer.max_steps=-1", "trainer.limit_train_batches=4", "output_dir=${hydra:runtime.cwd}/fixed"]
    command = [COMMAND, "train", "gpt_ddp", "trainer=cpu", *SMALL, *few, "tracking.page=null"]
    first = run(*command, "trainer.max_epochs=1").stdout
    said = "the first would come after 15 batches, and the training ends after 4 at most"
    assert 0 < first.find(said) < first.find("batch 1/4"), first
    assert "No checkpoint has a 'val/loss', so that none is the best of this training." in first
    assert re.search(r"\| train/loss +\| +\d", first), "the table"
    assert _saved() == [(4, 2, "epoch", None)]
    assert "Going on from" in run(*command, "trainer.max_epochs=2").stdout
    assert _saved() == [(8, 2, "epoch", None), (4, 2, "epoch", None)]


def _saved() -> list[tuple[int, int, str, float | None]]:
    found = CheckpointFolder(Path("fixed/checkpoints")).complete()
    return [(each.step, each.world_size, each.reason, each.score) for each in found]


@pytest.mark.usefixtures("store")
def test_a_vocabulary_larger_than_the_models_is_an_error_before_training() -> None:
    done = run(
        COMMAND, "train", "gpt_ddp", "trainer.accelerator=cpu", *SMALL, "model.network.vocab_size=100", check=False
    )
    assert done.returncode != 0
    assert "The network has 100 tokens, but the tokenizer has 256" in done.stdout
    assert "Set model.network.vocab_size=256 or more" in done.stdout
    assert "batch 1/" not in done.stdout


def test_sequences_are_as_long_as_the_model_allows(composed: Compose) -> None:
    for override, length in (("model=gpt_tiny", 128), ("model=gpt_125m", 1024), ("model.network.context=64", 64)):
        assert composed("gpt_ddp", override).data.sequence_length == length


@pytest.mark.parametrize(
    "recipe",
    [
        "gpt_tensor_parallel",
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("gpt_zero3", "gpt_pipeline")),
    ],
)
def test_a_model_over_two_nodes_learns_and_counts_its_tokens_once(recipe: str, store: MlflowClient) -> None:
    small = [override for override in SMALL if "layers" not in override and "val_check" not in override]
    train = [COMMAND, "train", recipe, "trainer=cpu", "trainer.devices=1", *small, "model.network.layers=2"]
    output = run(COMMAND, "emulate", "--nodes", "2", "--", *train).stdout
    mine = the_run(store)
    assert mine.info.status == "FINISHED"
    losses = [metric.value for metric in store.get_metric_history(mine.info.run_id, "train/loss")]
    assert losses[-1] < losses[0] - 0.5, output
    replicas = 2 if recipe == "gpt_zero3" else 1
    rate, of_a_device = (mine.data.metrics[f"summary/samples_per_second{each}"] for each in ("", "_per_device"))
    assert of_a_device == pytest.approx(rate / 2)
    assert 0.3 < tokens_of_a_step(store, mine) / (replicas * 8 * 32) < 3


@pytest.mark.slow
@pytest.mark.parametrize("which", ["one of each kind", pytest.param("the others", marks=pytest.mark.exhaustive)])
def test_each_strategy_trains_in_one_process_of_an_emulated_job(store: MlflowClient, which: str) -> None:
    """One after the other in the same process, with the losses of DDP; exchanges would come later."""
    Path("my_callbacks.py").write_text(CALLBACK)
    strategies = STRATEGIES[which]
    train = [COMMAND, "train", "gpt_ddp", "-m", f"strategy={','.join(strategies)}", "trainer=cpu", "trainer.devices=1"]
    record = ["callbacks={record: {_target_: my_callbacks.Record}}", "tracking=console", "checkpoint=none"]
    last = ["trainer.max_steps=32", "trainer.val_check_interval=32", "model.network.layers=2"]
    small = [each for each in SMALL if each.partition("=")[0] not in {one.partition("=")[0] for one in last}]
    emulate = [COMMAND, "emulate", "--nodes", "1", "--"]
    run(*emulate, *train, *small, *last, *record, variables={"PYTHONPATH": str(Path.cwd())})
    found = [json.loads(line) for line in Path("losses.jsonl").read_text().splitlines()]
    assert [world_size for _, world_size, _ in found] == [1] * len(strategies)
    _, _, expected = found[0]
    assert len(expected) == 32, "a period of DiLoCo"
    for strategy, (kind, _, losses) in zip(strategies, found, strict=True):
        assert losses[:3] == pytest.approx(expected[:3], rel=1e-5), f"{strategy}, {kind}"
        assert losses == pytest.approx(expected, rel=1e-3), f"{strategy}, {kind}"
