"""`azureml-strategy train` as a user types it: one output folder, one MLflow run, and errors in a few lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mlflow import MlflowClient
from tests.training.conftest import COMMAND, RESNET, TINY, files, run, the_run

EMULATE = [COMMAND, "emulate", "--nodes", "2", "--"]
# What tells the number of nodes, or the node, beside the variables that Azure ML's own page lists.
BEYOND_DOCUMENTED = (
    *("AZUREML_NODE_COUNT", "AZUREML_CR_NODE_RANK", "AZ_BATCH_HOST_LIST", "AZ_BATCH_NODE_LIST", "AZ_BATCH_MASTER_NODE"),
    *("AZ_BATCHAI_JOB_MASTER_NODE_IP", "AZ_BATCHAI_MPI_MASTER_NODE", "AZ_BATCHAI_CLUSTER_NAME"),
    *("AZ_BATCHAI_IS_CURRENT_NODE_MASTER", "AZ_BATCH_IS_CURRENT_NODE_MASTER"),
)


def test_a_recipe_of_the_users_by_path(store: MlflowClient) -> None:
    folder = Path("my runs")
    folder.mkdir()
    (folder / "mine.yaml").write_text(
        "# Mine.\ndefaults: [resnet50_synthetic, _self_]\nvars: {rate: 0.05}\nmodel: {learning_rate: '${vars.rate}'}\n"
    )
    output = run(COMMAND, "train", folder / "mine.yaml", "trainer.max_steps=2", *RESNET).stdout
    (recorded,) = files("**/.hydra/config.yaml")
    assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d/\.hydra/config\.yaml", recorded)
    mine = the_run(store)
    assert mine.info.status == "FINISHED"
    assert store.get_experiment(mine.info.experiment_id).name == "mine"
    assert (mine.data.params["model/learning_rate"], mine.data.params["seed"]) == ("0.05", "42")
    assert {"train/loss", "val/top1"} <= mine.data.metrics.keys()
    assert len(store.get_metric_history(mine.info.run_id, "train/loss")) == 2
    assert "val/top1" in output.partition("+--")[2], "the table at the end"
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["emulate", "--nodes", "2", "--distribution", "none", "--", COMMAND, "train"], "distribution: {type: pytorch"),
        (["train", "-m", "seed=1,2"], "Did you mean 'trainer.max_epochs'"),
        (["emulate", "--", COMMAND, "train"], "num_nodes=3"),
    ],
)
@pytest.mark.usefixtures("store")
def test_what_is_refused_ends_with_2_and_a_few_lines(command: list[str], words: str) -> None:
    wrong = "trainer.num_nodes=3" if "num_nodes" in words else "+trainer.max_epoch=1"
    command.insert(command.index("train") + 1, "resnet50_synthetic")
    done = run(COMMAND, *command, wrong, *TINY, check=False)
    assert done.returncode == 2, done.stdout
    assert words in done.stdout
    assert "azureml-strategy: " in done.stdout
    assert "Traceback" not in done.stdout
    assert "#1" not in done.stdout, "the sweep ends there"


def test_groups_from_a_folder_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "mine" / "data").mkdir(parents=True)
    (tmp_path / "mine" / "data" / "faces.yaml").write_text("# @package _global_\ndata: {_target_: my.Faces}\n")
    for flags in (["--config-dir", "mine"], [f"hydra.searchpath=[file://{tmp_path}/mine]"]):
        done = run(COMMAND, "train", "resnet50_synthetic", *flags, "data=faces", "--cfg", "job")
        assert "_target_: my.Faces" in done.stdout
    assert not files("outputs/**/*")


@pytest.mark.exhaustive
def test_a_job_whose_variables_do_not_tell_the_number_of_nodes(store: MlflowClient) -> None:
    unset = [word for name in BEYOND_DOCUMENTED for word in ("-u", name)]
    train = [COMMAND, "train", "resnet50_synthetic", "trainer.max_steps=2", *TINY]
    done = run(*EMULATE, "env", *unset, *train)
    assert "Azure ML job: launcher pytorch, 2 node(s) x 1 process(es), rendezvous at " in done.stdout
    job = the_run(store)
    assert job.info.status == "FINISHED"
    assert len(store.get_metric_history(job.info.run_id, "train/loss")) == 2
    assert len(files("**/.hydra")) == 1


def test_a_sweep_under_the_emulator_is_one_sweep(store: MlflowClient) -> None:
    """With externally launched ranks, stock Lightning has one folder if both start within the same second."""
    done = run(*EMULATE, COMMAND, "train", "resnet50_synthetic", "-m", "seed=1,2", *TINY)
    job = the_run(store)
    assert job.info.status == "FINISHED"
    assert files("multirun/*") == [f"multirun/{job.info.run_id}"]
    assert files("**/.hydra") == [f"multirun/{job.info.run_id}/{number}/.hydra" for number in (0, 1)]
    assert done.stdout.count("2 node(s) x 1 process(es), rendezvous") == 2
    for rank in (0, 1):
        for number in (0, 1):
            assert len(re.findall(rf"\[rank {rank}, node {rank}\].*\t#{number} : seed", done.stdout)) == 1
    assert len(store.get_metric_history(job.info.run_id, "train/loss")) == 4


@pytest.mark.exhaustive
def test_resnet50_in_two_stages(store: MlflowClient) -> None:
    small = ["data=synthetic", *RESNET, "data.batch_size=8", "trainer.max_epochs=1"]
    run(*EMULATE, COMMAND, "train", "resnet50_pipeline", *small)
    job = the_run(store)
    assert job.info.status == "FINISHED"
    assert len(store.get_metric_history(job.info.run_id, "train/loss")) == 2
    assert {"val/top1", "pipeline/bubble", "pipeline/stage_1_work_s"} <= job.data.metrics.keys()
