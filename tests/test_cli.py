"""The command line, up to where a verb takes over."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import azureml_strategy
from azureml_strategy.cli import main
from azureml_strategy.cli.verbs import print_text
from azureml_strategy.training.recipes import shipped_recipes

COMMAND = [sys.executable, "-m", "azureml_strategy.cli"]
CONF = Path(__file__).parents[1] / "conf"
HEAVY = ["torch", "lightning", "mlflow", "hydra", "omegaconf", "numpy", "rich", "azure", "importlib.metadata"]
HEAVY += ["azureml_strategy.training"]


def test_help_of_everything_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom azureml_strategy.cli import main\n"
        "for arguments in (['--help'], ['emulate', '--help'], ['recipes', '--help'],"
        " ['bench', '--help'], ['doctor', '--help'], ['consolidate', '--help'], ['submit', '--help'],"
        " ['study', '--help'], ['jobs', '--help'], ['cluster', '--help'], ['data', '--help'], ['model', '--help'],"
        " ['environment', '--help'], ['workspace', '--help'], ['init', '--help'], ['completion', '--help']):\n"
        "    try:\n        main(arguments)\n    except SystemExit as end:\n        assert end.code == 0\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
        "assert main(['recipes']) == 0\n"
        "try:\n    main(['train', '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        f"print([name for name in {HEAVY[:-1]} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines().count("[]") == 2, done.stdout
    for word in ("train", "emulate", "recipes", "azureml-strategy train resnet50_ddp", "--processes-per-node"):
        assert word in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    declared = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["version"]
    assert capsys.readouterr().out.strip() == version("azureml-strategy") == azureml_strategy.__version__ == declared


def test_recipes_are_listed_with_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [recipe.name for recipe in shipped_recipes()]
    assert all(len(line.split()) > 5 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "azureml-strategy init my_project\n"),
        (["trian"], "There is no verb 'trian'. Did you mean 'train'?"),
        (["train.py"], "azureml-strategy emulate --nodes 2 -- python train.py"),
        (["resnet50_ddp"], "azureml-strategy train resnet50_ddp"),
        (["jobs"], "A verb is missing after `azureml-strategy jobs`: list, show, logs"),
        (["jobs", "lst"], "There is no verb 'jobs lst'. Did you mean 'list'?"),
        (["recipes", "all"], "azureml-strategy recipes takes no 'all'"),
        (["emulate", "--nodez", "2", "--", "true"], "has no option '--nodez'. Did you mean '--nodes'"),
        (["train"], "required: RECIPE"),
        (["train", "-m", "resnet50_ddp", "seed=1,2"], "azureml-strategy train RECIPE -m seed=1,2"),
        (["train", "my/train.py"], "`azureml-strategy emulate --nodes 2 -- python my/train.py`"),
        (["train", "seed=1", "resnet50_ddp"], "Type the recipe first: RECIPE seed=1"),
        (["emulate", "--nodes", "two", "--", "true"], "invalid int value: 'two'"),
        (["emulate"], "azureml-strategy: No command was given"),
        (["emulate", "--nodes", "0", "--", "true"], "azureml-strategy: 0 node(s)"),
        (["emulate", "--distribution", "slurm", "--", "true"], "azureml-strategy: Azure ML has no distribution"),
        (["emulate", "--bandwidth", "1gbit", "--", "true"], "azureml-strategy: --bandwidth shapes"),
        (["emulate", "--", "pyhton"], "azureml-strategy: There is no program 'pyhton'"),
        (["train", "resnet50_dpd"], "Did you mean 'resnet50_ddp'"),
        (["train", "resnet50_ddp", "trainer.max_epoch=1"], "Did you mean 'trainer.max_epochs'"),
        (["train", "resnet50_ddp", "clustr=nc24ads_a100_v4"], "Did you mean 'cluster'"),
        (["train", "resnet50_ddp", "cluster=nd96isr_h100"], "Did you mean 'nd96isr_h100_v5'"),
        (["train", "resnet50_ddp", "cluster=Standard_ND96isr_H100_v5"], "Did you mean 'nd96isr_h100_v5'"),
        (["train", "resnet50_ddp", "-m", "cluster=nc24ads_a100_v4,nd96isr_h100"], "Did you mean 'nd96isr_h100_v5'"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_a_word(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        exit_code: object = main(arguments)
    except SystemExit as end:
        exit_code = end.code
    captured = capsys.readouterr()
    assert exit_code == 2
    assert words in captured.err
    assert not captured.out


def test_a_folder_in_place_of_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(tmp_path)]) == 2
    assert "`azureml-strategy init`" in capsys.readouterr().err
    (tmp_path / "mine.yaml").touch()
    assert main(["train", str(tmp_path)]) == 2
    assert f"Name a recipe in it: {tmp_path / 'mine.yaml'}." in capsys.readouterr().err


def test_help_of_train_names_every_group_with_its_choices_and_every_recipe() -> None:
    done = subprocess.run([*COMMAND, "train", "--help"], capture_output=True, text=True, check=True)
    groups, recipes = done.stdout.split("groups, each GROUP=CHOICE:")[1].split("recipes:")
    shipped = sorted(path.relative_to(CONF).with_suffix("") for path in CONF.glob("*/*.yaml"))
    assert shipped
    words = groups.replace(",", " ").split()
    for name in {path.parent.name for path in shipped}:
        chosen = words[words.index(name) + 1 :] if name != "data" else words
        assert {path.name for path in shipped if path.parent.name == name} <= set(chosen)
    assert all(f"  {recipe.name} " in recipes for recipe in shipped_recipes())


def test_what_follows_two_dashes_is_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["python", "-c", "import sys; print(sys.argv[1:])", "--nodes", "--", "-x"]
    assert main(["emulate", "--processes-per-node", "2", "--", *command]) == 0
    assert capsys.readouterr().out.count("] ['--nodes', '--', '-x']") == 2


def test_an_error_that_nobody_expected_tells_no_secret() -> None:
    code = (
        "import os\nfrom azureml_strategy.cli import main\nmain(['recipes'])\nraise ValueError(os.environ['HF_TOKEN'])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, "HF_TOKEN": "opaque-4711"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ValueError: <redacted>\n")


def test_what_a_verb_prints_tells_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as a job that somebody has submitted with a token in its variables."""
    address = "https://ml.azure.com/runs/a?wsid=/subscriptions/0-1/resourceGroups/g"
    print_text(f"environment_variables:\n  HF_TOKEN: abcdefg\n  SEED: '1'\n{address}")
    shown = f"environment_variables:\n  HF_TOKEN: <redacted>\n  SEED: '1'\n{address}\n"
    assert capsys.readouterr().out == shown
