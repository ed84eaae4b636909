"""The command line, up to where a verb takes over."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from azureml_strategy import __version__
from azureml_strategy.cli import main
from azureml_strategy.cli.verbs import print_text
from azureml_strategy.training.recipes import shipped_recipes

HEAVY = ["torch", "lightning", "mlflow", "hydra", "omegaconf", "numpy", "rich", "azure", "azureml_strategy.training"]


def test_help_of_everything_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom azureml_strategy.cli import main\n"
        "for arguments in (['--help'], ['train', '--help'], ['emulate', '--help'], ['recipes', '--help'],"
        " ['bench', '--help'], ['doctor', '--help'], ['consolidate', '--help'], ['submit', '--help'],"
        " ['study', '--help'], ['jobs', '--help'], ['cluster', '--help'], ['data', '--help'], ['model', '--help'],"
        " ['environment', '--help'], ['workspace', '--help']):\n"
        "    try:\n        main(arguments)\n    except SystemExit as end:\n        assert end.code == 0\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
        "assert main(['recipes']) == 0\n"
        f"print([name for name in {HEAVY[:-1]} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines().count("[]") == 2, done.stdout
    for word in ("train", "emulate", "recipes", "azureml-strategy train resnet50_ddp", "--processes-per-node"):
        assert word in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip() == __version__


def test_recipes_are_listed_with_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [recipe.name for recipe in shipped_recipes()]
    assert all(len(line.split()) > 5 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: VERB"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "required: RECIPE"),
        (["emulate", "--nodes", "two", "--", "true"], "invalid int value: 'two'"),
        (["emulate"], "azureml-strategy: No command was given"),
        (["emulate", "--nodes", "0", "--", "true"], "azureml-strategy: 0 node(s)"),
        (["emulate", "--distribution", "slurm", "--", "true"], "azureml-strategy: Azure ML has no distribution"),
        (["emulate", "--bandwidth", "1gbit", "--", "true"], "azureml-strategy: --bandwidth shapes"),
        (["emulate", "--", "pyhton"], "azureml-strategy: There is no program 'pyhton'"),
        (["train", "resnet50_dpd"], "Did you mean 'resnet50_ddp'"),
        (["train", "resnet50_ddp", "trainer.max_epoch=1"], "Did you mean 'trainer.max_epochs'"),
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
