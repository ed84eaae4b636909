from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from azureml_strategy.jobs.recipe import JobRecipe, code_folder, command_line, read_recipe, recipe_in_code
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.jobs.settings import ClusterSettings, JobSettings
from azureml_strategy.training.recipes import Recipe

PATHS = ("data.root=${{inputs.images}}", "output_dir=${{outputs.run}}")


def of(recipe: Recipe, *overrides: str, code: str | None = None, paths: tuple[str, ...] = ()) -> JobRecipe:
    return JobRecipe(recipe, overrides, paths, ClusterSettings(), JobSettings(code=code))


SHIPPED = Recipe("resnet50_ddp", None, "")


def test_paths_stand_without_quotation_marks() -> None:
    line = command_line(of(SHIPPED, "seed=1", paths=PATHS))
    assert line == f"azureml-strategy train resnet50_ddp seed=1 {' '.join(PATHS)}"


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=4))
@settings(max_examples=60)
def test_the_shell_gets_exactly_the_users_overrides(overrides: list[str]) -> None:
    assert shlex.split(command_line(of(SHIPPED, *overrides)))[3:] == overrides


def test_a_real_shell_agrees() -> None:
    overrides = [
        "a='b c'",
        'x="$HOME `id` \\ !"',
        "y={_target_: a.B, c: [1, 2]}",
        "z=${vars.name}",
        "~callbacks",
        "n='ü\n'",
    ]
    line = command_line(of(SHIPPED, *overrides)).replace("azureml-strategy train resnet50_ddp", "printf '%s\\0'", 1)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == overrides


def test_a_recipe_of_the_users_by_its_path_in_the_code(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    mine = Recipe("mine", str(tmp_path / "runs"), "")
    assert recipe_in_code(of(mine)) == "runs/mine.yaml"
    assert recipe_in_code(of(mine, code="runs")) == "./mine.yaml"
    assert recipe_in_code(of(mine, code=str(tmp_path))) == "runs/mine.yaml"
    assert code_folder(of(mine)) == "."
    assert code_folder(of(mine, code="runs")) == "runs"


def test_a_shipped_recipe_needs_no_code() -> None:
    assert code_folder(of(SHIPPED)) is None
    assert code_folder(of(SHIPPED, code=".")) == "."


def test_a_shipped_recipe_with_a_module_of_the_users_needs_it(tmp_path: Path) -> None:
    (tmp_path / "own_net.py").touch()
    (tmp_path / "einops.py").touch()  # which the installed one hides
    for target, folder in (("own_net.Net", "."), ("einops.Net", None), ("torch.nn.Linear", None)):
        assert code_folder(read_recipe("resnet50_ddp", [f"model._target_={target}"])) == folder


def test_a_recipe_that_the_job_would_not_find(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(JobError, match=r"mine.yaml lies in .*, outside of .*/a, .*job.code=FOLDER"):
        recipe_in_code(of(Recipe("mine", str(tmp_path), ""), code="a"))
    with pytest.raises(JobError, match=r"job\.code is nowhere, but there is no such folder"):
        code_folder(of(SHIPPED, code="nowhere"))


def test_a_recipe_without_a_model_makes_no_job() -> None:
    with pytest.raises(JobError, match=r"model\._target_ has no value"):
        read_recipe("base_run", [])
