"""The rate that the planner expects goes with the job of a recipe, and with no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tests.jobs.azure_service.service import AzureService
from tests.jobs.rendering import cache, own_recipe

from azureml_strategy.cli import main
from azureml_strategy.cluster.environ import EXPECTED_RATE_VARIABLE
from azureml_strategy.jobs import submit_recipe
from azureml_strategy.network.vm_sizes import lookup_vm_size
from azureml_strategy.planning.expected import expect_rate
from azureml_strategy.tracking.expected import ExpectedRate, parse_expected_rate

__all__ = ["cache"]  # a fixture
SIZE = "cluster=nd96isr_h100_v5"
SWEEP = ["--metric", "a", "--goal", "maximize", "--sweep", "model.learning_rate=uniform(0.1, 0.2)"]


def told(capsys: pytest.CaptureFixture[str], *words: str) -> ExpectedRate | None:
    """What a dry run writes into the job."""
    assert main(["submit", *words, "--dry-run"]) == 0
    job = yaml.safe_load(capsys.readouterr().out)
    variables = job.get("trial", job).get("environment_variables") or {}
    return parse_expected_rate(variables.get(EXPECTED_RATE_VARIABLE, ""))


def test_a_dry_run_shows_the_variable(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.batch_size=128", "trainer.accumulate_grad_batches=2"]
    found = told(capsys, "resnet50_imagenet", SIZE, "cluster.num_nodes=2", *words)
    planned = expect_rate("resnet50_imagenet", words, lookup_vm_size("nd96isr_h100_v5"), 2)
    assert found == parse_expected_rate(planned.to_text())
    assert found is not None
    assert found.samples_per_step == 128 * 2 * 16


def test_a_recipe_of_ones_own_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, own_recipe("runs/mine.yaml", "data: {batch_size: 64}"), SIZE)
    assert found is not None
    assert found.samples_per_step == 64 * 8


@pytest.mark.parametrize(
    "words",
    [
        ["gpt_diloco", SIZE],
        ["resnet50_ddp", "cluster.vm_size=Standard_ND96isr_H900_v9", "cluster.processes_per_node=8"],
        ["resnet50_ddp", "cluster.vm_size=Standard_D4s_v3"],
        ["resnet50_ddp", "cluster.compute=mine", "cluster.processes_per_node=8"],
        ["resnet50_ddp", SIZE, "cluster.processes_per_node=4"],
        ["resnet50_ddp", SIZE, "trainer.accumulate_grad_batches=many"],
        ["resnet50_ddp", SIZE, "data.batch_size=null"],
        ["resnet50_ddp", SIZE, *SWEEP],
    ],
)
def test_what_cannot_be_planned_has_none_and_makes_no_noise(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, *words) is None


def test_code_of_the_user_does_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("import pathlib\npathlib.Path('it_ran').touch()\nclass Net: pass\n")
    recipe = own_recipe("own.yaml", "model: {network: {_target_: mine.Net}}")
    assert told(capsys, recipe, SIZE) is None
    assert not Path("it_ran").exists()


def test_a_script_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("")
    assert told(capsys, "train.py", SIZE) is None


def test_a_variable_of_the_user_s_stays(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["resnet50_ddp", SIZE, f"+job.environment_variables.{EXPECTED_RATE_VARIABLE}=''"]
    assert told(capsys, *words) is None


def test_it_is_sent(azure_service: AzureService) -> None:
    job = submit_recipe("resnet50_ddp", [SIZE, "cluster.price_per_hour=3.5"])
    sent = azure_service.jobs[job.name].body["properties"]["environmentVariables"]
    assert parse_expected_rate(sent[EXPECTED_RATE_VARIABLE]) is not None


def test_larger_nodes_are_advised(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "resnet50_ddp", "cluster=nd40rs_v2", "cluster.num_nodes=2", "--dry-run"]) == 0
    assert "of one Standard_ND96amsr_A100_v4 (8 A100) 1." in capsys.readouterr().err
    assert main(["submit", "resnet50_ddp", SIZE, "cluster.num_nodes=4", "--dry-run"]) == 0
    assert "Scale up" not in capsys.readouterr().err
