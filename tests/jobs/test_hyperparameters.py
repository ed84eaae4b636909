"""Sweeps that Azure ML runs itself."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from azure.ai.ml import load_job
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tests.jobs.azure_service.service import AzureService
from tests.jobs.rendering import cache

from azureml_strategy.cli import main
from azureml_strategy.jobs import JobError, Sweep, job_yaml, parse_parameter, submit_script
from azureml_strategy.jobs.hyperparameters import Parameter
from azureml_strategy.jobs.recipe import plan_recipe
from azureml_strategy.jobs.render import build_offline
from azureml_strategy.training.checks import check_config, compose_recipe
from azureml_strategy.training.recipes import find_recipe

__all__ = ["cache"]  # a fixture

SIZE = "cluster=nc24ads_a100_v4"


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """The sweep, loaded and written again by azure-ai-ml, and what is told beside it."""
    assert main(["submit", "--dry-run", *words]) == 0
    captured = capsys.readouterr()
    file = Path("job.yaml")
    file.write_text(captured.out)
    assert job_yaml(load_job(file)).rstrip() == captured.out.rstrip()
    file.unlink()
    job: dict[str, Any] = yaml.safe_load(captured.out)
    return job, captured.err


def test_a_sweep_over_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ("--sweep", "model.learning_rate=loguniform(1e-4,1e-1)", "--sampling", "bayesian", "--stop", "bandit")
    job, told = dry_run(capsys, "resnet50_ddp", SIZE, *sweep)
    assert job["type"] == "sweep"
    assert job["trial"]["command"] == (
        f"azureml-strategy train resnet50_ddp {SIZE} output_dir=${{{{outputs.run}}}} "
        "++model.learning_rate=${{search_space.model_learning_rate}}"
    )
    space = job["search_space"]["model_learning_rate"]
    assert (math.exp(space["min_value"]), math.exp(space["max_value"])) == (pytest.approx(1e-4), pytest.approx(1e-1))
    assert job["sampling_algorithm"] == "bayesian"
    assert job["objective"] == {"goal": "maximize", "primary_metric": "val/top1"}, "what the checkpoints monitor"
    assert job["early_termination"]["type"] == "bandit"
    assert job["early_termination"]["slack_factor"] == 0.1
    assert job["limits"] == {"max_total_trials": 20, "max_concurrent_trials": 4}
    assert job["trial"]["resources"]["instance_count"] == 1
    assert job["trial"]["distribution"] == {"type": "pytorch", "process_count_per_instance": 1}
    assert job["outputs"]["run"] == {"type": "uri_folder", "mode": "rw_mount"}
    assert "not model.learning_rate=loguniform" in told
    assert "leave --stop out" in told


def test_a_sweep_over_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").touch()
    job, _ = dry_run(
        capsys,
        *("train.py", "cluster=nd96isr_h100_v5", "cluster.num_nodes=2", "--metric", "val/loss", "--goal", "minimize"),
        *("--sweep", "lr=uniform(0.1, 1)", "--sweep", "--weight-decay=choice(0, 1e-4)", "--sampling", "random"),
        *("--stop", "median(delay_evaluation=3)", "--trials", "6", "--concurrent", "2", "job.timeout=600"),
        *("--", "--name", "x y", "--rate", "${{search_space.lr}}"),
    )
    assert job["trial"]["command"] == (
        'python train.py --name \'x y\' --rate "${{search_space.lr}}" --weight-decay="${{search_space.weight_decay}}"'
    )
    assert job["search_space"] == {
        "lr": {"type": "uniform", "min_value": 0.1, "max_value": 1},
        "weight_decay": {"type": "choice", "values": [0, 0.0001]},
    }
    assert job["limits"] == {"max_total_trials": 6, "max_concurrent_trials": 2, "trial_timeout": 600}
    assert job["early_termination"] == {"type": "median_stopping", "delay_evaluation": 3, "evaluation_interval": 1}
    assert job["trial"]["distribution"]["process_count_per_instance"] == 8


def test_a_grid_tries_all_combinations(capsys: pytest.CaptureFixture[str]) -> None:
    grid = ("--sweep", "seed=choice(1, 2, 3)", "--sweep", "data.batch_size=choice(range(16, 65, 16))")
    job, _ = dry_run(capsys, "resnet50_ddp", SIZE, *grid, "--sampling", "grid")
    assert job["limits"]["max_total_trials"] == 12
    assert job["search_space"]["data_batch_size"]["values"] == [16, 32, 48, 64]


def test_what_deepspeeds_autotuner_tries(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("gpt_zero3", SIZE, "strategy=deepspeed_stage_2", "data.batch_size=8", "--sweep", "autotuning")
    job, _ = dry_run(capsys, *words)
    space = {name: each["values"] for name, each in job["search_space"].items()}
    assert space["data_batch_size"] == [4, 8, 16]
    assert str(space["strategy_reduce_bucket_size"]) == "[50000000, 500000000, 1000000000]"  # no 5e7
    assert space["strategy_overlap_comm"] == [True, False]
    assert job["objective"] == {"goal": "maximize", "primary_metric": "throughput/samples_per_second"}
    command = job["trial"]["command"]
    for name, values in space.items():
        command = command.replace(f"${{{{search_space.{name}}}}}", str(values[-1]))
    overrides = [word for word in shlex.split(command)[3:] if "${{" not in word]
    config = compose_recipe(find_recipe("gpt_zero3"), overrides)
    check_config(OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]))  # all are taken
    assert (config.strategy.reduce_bucket_size, config.data.batch_size) == (1_000_000_000, 16)


@pytest.mark.parametrize(
    ("text", "kind", "values"),
    [
        ("a=choice(1, 2)", "choice", (1, 2)),
        ("a=choice([adam, sgd])", "choice", ("adam", "sgd")),
        ("a=choice('adam', True)", "choice", ("adam", True)),
        ("a=quniform(1, 9, 2)", "quniform", (1, 9, 2)),
        ("a=uniform(max_value=2, min_value=-1)", "uniform", (-1, 2)),
        ("a=qloguniform(1, 100, 5)", "qloguniform", (0, math.log(100), 5)),
        ("a=normal(0, 2)", "normal", (0, 2)),
        ("a=lognormal(-3, 1)", "lognormal", (-3, 1)),
        ("a=randint(5)", "randint", (5,)),
    ],
)
def test_each_distribution(text: str, kind: str, values: tuple[Any, ...]) -> None:
    found = parse_parameter(text)
    assert (found.kind, found.values) == (kind, pytest.approx(values) if kind != "choice" else values)


@given(st.floats(1e-12, 1e12), st.floats(1e-12, 1e12))
@settings(max_examples=50)
def test_the_bounds_of_loguniform_are_those_of_the_value(low: float, high: float) -> None:
    if low >= high:
        return
    found = parse_parameter(f"x=loguniform({low!r}, {high!r})")
    assert [math.exp(float(each)) for each in found.values] == pytest.approx([low, high], rel=1e-9)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--sweep", "model.learning_rate"], "names no hyperparameter"),
        (["--sweep", "model.learning_rate=logunifrom(1,2)"], "Did you mean 'loguniform'"),
        (["--sweep", "model.learning_rate=uniform(1)"], "uniform takes uniform(min_value, max_value)"),
        (["--sweep", "model.learning_rate=uniform(2, 1)"], "not below the upper"),
        (["--sweep", "model.learning_rate=loguniform(-4, -1)"], "those of the value itself"),
        (["--sweep", "model.learning_rate=uniform(a, b)"], "takes numbers"),
        (["--sweep", "model.learning_rate=__import__('os')"], "there is no '__import__'"),
        (["--sweep", "model.learning_rate=choice(open('x'))"], "cannot be read"),
        (["--sweep", "model.learning_rate=0.1,0.2"], "cannot be read"),
        (["--sweep", "seed=choice()"], "choice takes numbers and texts"),
        (["--sweep", "seed=choice('a b')"], "the shell would read"),
        (["--sweep", "seed=normal(1, 0)"], "sigma is 0"),
        (["--sweep", "modle.learning_rate=uniform(1, 2)"], "the recipe has no such key"),
        (["--sweep", "seed=choice(1)", "--sweep", "seed=choice(2)"], "gives seed twice"),
        (["--sweep", "seed=choice(1)", "seed=4"], "an override sets it too"),
        (["--sweep", "seed=uniform(1, 2)", "--sampling", "grid"], "is a range"),
        (["--sweep", "seed=choice(1)", "--sampling", "gird"], "Known: random, grid, bayesian"),
        (["--sweep", "seed=choice(1)", "--stop", "bandid"], "Did you mean 'bandit'"),
        (["--sweep", "seed=choice(1)", "--stop", "bandit(slack=1)"], "takes numbers by name"),
        (["--sweep", "seed=choice(1)", "--metric", "a", "--goal", "best"], "Known: minimize, maximize"),
        (["--sweep", "seed=choice(1)", "--trials", "0"], "1 to 1000"),
        (["--sweep", "seed=choice(1)", "checkpoint=none"], "which trial is the best"),
        (["--sweep", "autotuning"], "this recipe's strategy has none"),
        (
            ["--sweep", "seed=choice(1)", "job.outputs.run.path=azureml://datastores/a/paths/b"],
            "All trials would write",
        ),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--dry-run", "resnet50_ddp", SIZE, *words]) == 2
    captured = capsys.readouterr()
    assert error in captured.err
    assert captured.out == ""


def test_a_command_says_where_its_hyperparameters_go(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").touch()
    sweep = ("--sweep", "lr=uniform(0, 1)", "--metric", "loss", "--goal", "minimize")
    assert main(["submit", "--dry-run", "--command", "python train.py", SIZE, *sweep]) == 2
    assert "does not say where it goes" in capsys.readouterr().err
    job, _ = dry_run(capsys, "--command", "python train.py --x ${{search_space.lr}}", SIZE, *sweep)
    assert job["trial"]["command"] == "python train.py --x ${{search_space.lr}}"


def test_a_recipes_own_folder_of_each_trial() -> None:
    sweep = Sweep((Parameter("seed", "choice", (1, 2)),))
    place = r"job.outputs.run.path='azureml://datastores/a/paths/\${{name}}'"
    made: Any = build_offline(plan_recipe("resnet50_ddp", [SIZE, place], sweep))
    assert made.outputs["run"].path == "azureml://datastores/a/paths/${{name}}"


def test_it_is_submitted(azure_service: AzureService) -> None:
    Path("train.py").touch()
    sweep = Sweep((parse_parameter("lr=uniform(0, 1)"),), metric="loss", goal="minimize", trials=3)
    job = submit_script(
        "train.py", ["--a", "b c"], cluster="nc24ads_a100_v4", overrides=["cluster.price_per_hour=3"], sweep=sweep
    )
    sent = azure_service.jobs[job.name].body["properties"]
    assert sent["jobType"] == "Sweep"
    assert sent["trial"]["command"] == "python train.py --a 'b c' --lr=\"${{search_space.lr}}\""
    assert "/codes/" in sent["trial"]["codeId"]
    assert sent["searchSpace"]["lr"] == ["uniform", [0, 1]]
    assert sent["limits"]["maxTotalTrials"] == 3
    assert sent["trial"]["environmentVariables"]["AZUREML_STRATEGY_PRICE_PER_HOUR"] == "3.0"


def test_a_sweep_without_metric_is_refused_before_a_request(azure_service: AzureService) -> None:
    Path("train.py").touch()
    with pytest.raises(JobError, match="--metric NAME"):
        submit_script("train.py", cluster="nc24ads_a100_v4", sweep=Sweep((parse_parameter("lr=uniform(0, 1)"),)))
    assert not azure_service.asked("PUT", "")
