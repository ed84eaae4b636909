"""A recipe that names a module beside it: wherever the command is typed, and in every process of the run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.jobs.rendering import cache, rendered
from tests.training.conftest import COMMAND, TINY, run

__all__ = ["cache"]  # a fixture
PARTS = """\
from lightning.pytorch import Callback
from azureml_strategy.data import SyntheticDataModule
from numbers_of import Numbers
from torch.utils.data import DataLoader


class Data(SyntheticDataModule):
    def setup(self, stage):
        super().setup(stage)
        if self.trainer.global_rank == 0 and self.trainer.world_size > 1:
            loader = DataLoader(Numbers(), None, num_workers=1, multiprocessing_context="spawn")
            print("a spawned worker reads", list(loader))


class Where(Callback):
    def on_fit_start(self, trainer, module):
        import beside

        print(f"rank {trainer.global_rank} of {trainer.world_size}, beside from {beside.PLACE}", flush=True)
"""
# What a spawned worker has to import; `random` is to be Python's own, although a file beside it has its name.
NUMBERS = """\
import random


class Numbers:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index + random.Random(0).randint(0, 0)
"""
RECIPE = """\
defaults: [resnet50_synthetic, {override tracking: console}, _self_]
data: {_target_: own_parts.Data}
callbacks: {where: {_target_: own_parts.Where}}
trainer: {max_steps: 1}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe in a folder, with a module beside it, and another one in the current folder."""
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "own_parts.py").write_text(PARTS)
    (runs / "numbers_of.py").write_text(NUMBERS)
    (runs / "random.py").write_text("raise SystemExit('not Python\\'s own')\n")
    (runs / "beside.py").write_text("PLACE = 'the recipe'\n")
    (tmp_path / "beside.py").write_text("PLACE = 'the current folder'\n")
    (runs / "mine.yaml").write_text(RECIPE)
    return runs / "mine.yaml"


def test_in_each_job_of_a_sweep_that_changes_the_folder(recipe: Path) -> None:
    sweep = ["-m", "seed=1,2", "hydra.job.chdir=true"]
    output = run(COMMAND, "train", "runs/mine.yaml", *sweep, "trainer.devices=1", *TINY).stdout
    assert output.count("rank 0 of 1, beside from the recipe") == 2


@pytest.mark.usefixtures("recipe")
def test_a_module_of_the_current_folder_in_a_shipped_recipe() -> None:
    for name in ("own_parts.py", "numbers_of.py"):
        os.rename(f"runs/{name}", name)
    added = "+callbacks.where._target_=own_parts.Where"
    output = run(COMMAND, "train", "resnet50_synthetic", added, "trainer.max_steps=1", *TINY, "tracking=console").stdout
    assert "rank 0 of 1, beside from the current folder" in output


@pytest.mark.exhaustive
@pytest.mark.usefixtures("recipe", "store")
def test_the_rendered_command_in_a_real_shell() -> None:
    """As a node of Azure ML runs it, which stands in the folder of code: both its ranks, and a worker of one."""
    job = rendered("runs/mine.yaml", "cluster=nc24ads_a100_v4", "trainer=cpu", *TINY)
    command = job["command"].replace("${{outputs.run}}", "out")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["PATH"] = f"{Path(COMMAND).parent}{os.pathsep}{environ['PATH']}"
    done = subprocess.run(["bash", "-c", command], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2, beside from the recipe" in done.stdout
    assert "a spawned worker reads [0, 1, 2, 3]" in done.stdout


def test_a_module_that_an_installed_one_hides_is_named(recipe: Path) -> None:
    recipe.with_name("einops.py").write_text("class Net: ...\n")
    done = run(COMMAND, "train", recipe, "callbacks.where._target_=einops.Net", *TINY, check=False)
    assert done.returncode == 2, done.stdout
    assert f"{recipe.with_name('einops.py')} is hidden by" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("own_pats.Where", r"There is no module own_pats. .* Did you mean 'own_parts'"),
        ("own_parts.Were", r"own_parts.py has no Were. Did you mean 'Where'"),
        ("broken.Where", r"broken.py, line 2: .*ModuleNotFoundError: No module named 'no_such_thing'"),
    ],
)
def test_what_cannot_be_found_is_said_in_a_sentence(recipe: Path, target: str, words: str) -> None:
    recipe.with_name("broken.py").write_text("import os\nimport no_such_thing\n")
    done = run(COMMAND, "train", recipe, f"callbacks.where._target_={target}", *TINY, check=False)
    assert done.returncode == 2, done.stdout
    assert re.search(words, done.stdout), done.stdout
    assert "callbacks.where._target_" in done.stdout
    assert "Traceback" not in done.stdout
