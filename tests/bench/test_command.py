"""`azureml-strategy bench`, up to where it needs a job."""

from __future__ import annotations

import subprocess
import sys

import pytest

from azureml_strategy.cli import main


def test_its_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom azureml_strategy.cli import main\n"
        "try:\n    main(['bench', '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print([name for name in ('torch', 'matplotlib', 'rich', 'mlflow', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for option in ("--collectives", "--sizes", "--pairs", "--expect", "--no-mlflow", "emulate --nodes 2"):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "bench measures what the processes of a job send one another"),
        (["--sizes", "64M"], "'64M' is no message size"),
        (["--collectives", "all-reduce,gather"], "there is no 'gather'"),
        (["--collectives", "all-reduce", "--pairs"], "Leave --collectives out"),
        (["--dtype", "int8"], "--dtype: there is no 'int8'"),
        (["--iterations", "many"], "invalid int value: 'many'"),
        (["--expect", "0"], "--expect 0 cannot be"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_a_word(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        exit_code: object = main(["bench", *arguments])
    except SystemExit as end:
        exit_code = end.code
    captured = capsys.readouterr()
    assert exit_code == 2
    assert words in captured.err
    assert not captured.out
