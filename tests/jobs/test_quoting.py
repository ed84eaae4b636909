"""Whatever a user types reaches the program exactly: through the rendered YAML, azure-ai-ml and a real shell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from azure.ai.ml import load_job
from hydra import compose, initialize
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.jobs.rendering import cache

from azureml_strategy.jobs import JobError, job_yaml
from azureml_strategy.jobs.azure_internals import standalone_job
from azureml_strategy.jobs.program import Program, hydra_text, plan_program, quote_argument
from azureml_strategy.jobs.render import build_offline

__all__ = ["cache"]  # a fixture

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
PIECES = st.sampled_from(
    [
        "${{",
        "}}",
        "inputs.images",
        "{inputs.images}",
        "${{inputs.",
        "$",
        "{",
        "'",
        '"',
        "\\",
        "`id`",
        "$(id)",
        "\n",
        " ",
    ]
)
ARGUMENTS = st.one_of(TEXT, st.lists(st.one_of(PIECES, TEXT), max_size=6).map("".join))
REFERENCES = ("inputs.images", "outputs.run")
# What azure-ai-ml and the service look for.
READ_BY_AZURE = re.compile(r"\$\{\{|(?<!\{)\{(?:inputs|outputs|search_space)\.")


def means_a_reference(text: str) -> bool:
    return re.search(r"\$\{\{\s*(?:inputs|outputs|search_space)\b[^}]*\}\}", text) is not None


def shell_words(line: str, shell: str = "bash") -> list[str]:
    program = "import sys, json; print(json.dumps(sys.argv[1:]))"
    command = f"{sys.executable} -c '{program}' {line}"
    done = subprocess.run([shell, "-c", command], capture_output=True, text=True, check=True)
    words: list[str] = json.loads(done.stdout)
    return words


@given(st.lists(ARGUMENTS.filter(lambda text: not means_a_reference(text)), min_size=1, max_size=8))
@settings(max_examples=40)
def test_a_shell_gives_the_program_exactly_these_arguments(arguments: list[str]) -> None:
    line = " ".join(quote_argument(each, REFERENCES) for each in arguments)
    assert not READ_BY_AZURE.search(line), "nobody takes a part of an argument for a reference"
    for shell in ("bash", "sh"):
        assert shell_words(line, shell) == arguments


@given(TEXT.filter(lambda text: "{" not in text), TEXT.filter(lambda text: "{" not in text))
@settings(max_examples=30)
def test_a_reference_inside_an_argument(before: str, after: str) -> None:
    quoted = quote_argument(f"{before}${{{{ inputs.images }}}}{after}", REFERENCES)
    assert shell_words(quoted.replace("${{inputs.images}}", "/mnt/a  folder")) == [f"{before}/mnt/a  folder{after}"]
    assert shell_words(quoted.replace("${{inputs.images}}", "$HOME")) == [f"{before}{os.environ['HOME']}{after}"]


@given(st.lists(ARGUMENTS.filter(lambda text: not means_a_reference(text)), max_size=4))
@settings(max_examples=15)
def test_yaml_and_azure_ai_ml_leave_the_command_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, arguments: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("job")
    script = folder / "train.py"
    script.touch()
    plan = plan_program(Program(script=str(script), arguments=arguments), ["cluster=nc24ads_a100_v4"])
    (folder / "job.yaml").write_text(job_yaml(build_offline(plan)), encoding="utf-8")
    sent = standalone_job(load_job(folder / "job.yaml"))._to_rest_object().properties.command
    assert sent == plan.command
    assert shell_words(sent.removeprefix("python train.py")) == arguments


@pytest.mark.parametrize(
    "argument", ["${{inputs.imagse}}", "--x=${{ outputs.rum }}", "${{search_space.lr}}", "${{inputs.a b}}"]
)
def test_a_misspelt_reference_is_refused(argument: str) -> None:
    with pytest.raises(JobError, match="refers to no input or output of this job"):
        quote_argument(argument, REFERENCES)


def test_a_null_character_is_refused() -> None:
    with pytest.raises(JobError, match="null character"):
        quote_argument("a\0b", REFERENCES)


@given(st.lists(ARGUMENTS, min_size=1, max_size=8))
@settings(max_examples=25)
def test_hydra_reads_any_text_back(texts: list[str]) -> None:
    # A line that ends in the middle of a value is no override; paths and addresses have no such characters.
    texts = ["".join(character for character in text if character.isprintable()) for text in texts]
    with initialize(version_base="1.3", config_path=None):
        composed = compose(overrides=[f"+text_{place}={hydra_text(text)}" for place, text in enumerate(texts)])
    assert [composed[f"text_{place}"] for place in range(len(texts))] == texts
