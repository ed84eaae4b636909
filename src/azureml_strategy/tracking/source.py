"""What was run: a name for the run, the command line that repeats it, and the git commit of its code."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile, pairwise
from pathlib import Path

from azureml_strategy.cluster.redaction import REDACTED, is_private_name, redact, redact_text

COMMAND_TAG = "azureml_strategy.command"
RECIPE_TAG = "azureml_strategy.recipe"
OVERRIDES_TAG = "azureml_strategy.overrides"
UNCOMMITTED_TAG = "azureml_strategy.git_uncommitted_changes"
# mlflow.utils.mlflow_tags: MLFLOW_GIT_COMMIT, MLFLOW_GIT_BRANCH, MLFLOW_GIT_REPO_URL
GIT_COMMIT, GIT_BRANCH, GIT_URL = (f"mlflow.source.git.{each}" for each in ("commit", "branch", "repoURL"))

# The list of runs shows about half of it. MLflow's column of names holds 250 characters, Azure ML's 256.
_NAME_LENGTH = 120
# Keys that say where a run runs and keeps its files. They say nothing about what it does, and are often long paths.
_KEYS_OF_PLACES = ("output_dir", "resume", "hydra", "job", "cluster", "tracking", "checkpoint")
# An absolute or relative path, or an address, at the start of a value or of an item in it.
_PATH = re.compile(r"(?:^|[\s,:\[({'\"])(?:~|\.{0,2})/|://|^\w:\\|^azureml:")
# A repository on a slow network drive may take minutes.
_GIT_TIMEOUT_S = 5.0


def recipe_run_name(recipe: str, overrides: Sequence[str]) -> str:
    """The recipe and what was changed in it: `resnet50_ddp model.learning_rate=0.1 trainer.max_epochs=3`.

    Secrets, paths and keys that only say where it runs and keeps its files are left out. The same recipe and overrides
    always have the same name. A name that would exceed 120 characters ends with the number of further overrides.
    """
    shown = [_printable(each) for each in overrides if _is_about_training(each)]
    name = _printable(recipe)[:_NAME_LENGTH]
    for number, override in enumerate(shown):
        left = len(shown) - number - 1
        rest = f" +{left}" if left else ""
        if len(f"{name} {override}{rest}") > _NAME_LENGTH:
            more = f" +{left + 1}"
            return f"{name[: _NAME_LENGTH - len(more)]}{more}"
        name = f"{name} {override}"
    return name


def script_run_name(argv: Sequence[str] | None = None) -> str:
    """The name of the running script's file, without its suffix: `train`.

    It is the folder's name for a package that runs by its `__main__.py`, and `notebook` or `python` where no script
    runs.
    """
    program = Path((sys.argv if argv is None else argv or [""])[0])
    if program.stem in ("ipykernel_launcher", "colab_kernel_launcher"):
        return "notebook"
    stem = program.parent.name if program.stem == "__main__" else program.stem
    return "python" if stem in ("", "-", "-c") else _printable(stem)[:_NAME_LENGTH]


def command_run_name(words: Sequence[str]) -> str:
    """The name that a command gives its run: that of its recipe, script or program.

    Args:
        words: such as `azureml-strategy train resnet50_ddp seed=1`, `python train.py --lr 0.1` or `python -m tool`.
    """
    if words[0] == "env":  # it sets variables, and then runs the rest
        words = list(dropwhile(lambda each: "=" in each, words[1:])) or words
    match [Path(words[0]).name, *words[1:]]:
        case ["azureml-strategy", "train", recipe, *rest]:
            overrides = [each for each in rest if "=" in each or each.startswith("~")]
            return recipe_run_name(Path(recipe).stem, [each for each in overrides if not each.startswith("-")])
        case ["azureml-strategy", verb, *_]:
            return script_run_name([verb])
        case [_, "-m", module, *_]:
            return script_run_name([module.rpartition(".")[2]])
    return script_run_name([next((each for each in words if each.endswith(".py")), words[0])])


def command_text(words: Sequence[str]) -> str:
    """A command line for a shell, without secrets."""
    # A path may have bytes that are no text. No store takes them, so each becomes `?`.
    return shlex.join(each.encode(errors="replace").decode() for each in _without_secrets(words))


def script_command() -> str:
    """The command line of this process, without secrets."""
    words = getattr(sys, "orig_argv", None) or [sys.executable, *sys.argv]
    return command_text([Path(words[0]).name, *words[1:]])


def with_source_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Add MLflow's own tags about the program that runs, and its command line and git commit. The given tags win.

    The tags of a recipe have its command and commit already. MLflow would add the commit of the folder in which
    `azureml-strategy` is installed, so its tags of the commit are left out there.
    """
    from mlflow.tracking.context.registry import resolve_tags

    if COMMAND_TAG not in tags:
        script = Path(sys.argv[0] if sys.argv else "")
        folder = script.parent if script.is_file() else Path()
        tags = {COMMAND_TAG: script_command(), **git_tags(folder), **tags}
    found: dict[str, str] = resolve_tags(dict(tags))
    wrong = {GIT_COMMIT, GIT_BRANCH, GIT_URL} - tags.keys() if RECIPE_TAG in tags else ()
    return {name: value for name, value in found.items() if name not in wrong}


def git_tags(folder: Path) -> dict[str, str]:
    """MLflow's tags of the git commit of a folder, and whether its checkout had uncommitted changes.

    Untracked files do not count as changes. There are no tags if the folder is in no checkout, if git ignores it, if
    there is no commit yet, or if git is missing or does not answer within five seconds.
    """
    status = _git(folder, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    lines = (status or "").splitlines()
    about = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
    commit = about.get("branch.oid", "(initial)")
    if commit == "(initial)" or _git(folder, "check-ignore", ".") is not None:
        return {}
    changed = any(not line.startswith("#") for line in lines)
    tags = {GIT_COMMIT: commit, UNCOMMITTED_TAG: str(changed).lower()}
    if about.get("branch.head", "(detached)") != "(detached)":
        tags[GIT_BRANCH] = about["branch.head"]
    address = (_git(folder, "remote", "get-url", "origin") or "").strip()
    return tags | ({GIT_URL: address} if address else {})


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of git; None if it fails."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _is_about_training(override: str) -> bool:
    """Whether an override says what is trained and not where, and has no secret."""
    key, _, value = override.lstrip("+~").partition("=")
    if re.split("[./@]", key)[0] in _KEYS_OF_PLACES or _PATH.search(value.strip("'\"")):
        return False
    return REDACTED not in _without_secret(override)


def _without_secrets(words: Sequence[str]) -> Iterator[str]:
    """Redact the words of a command line. The name in `--name value` decides whether the value is a secret."""
    for before, word in pairwise(["", *words]):
        option = before.startswith("-") and "=" not in before and not word.startswith("-")
        yield str(redact(before.lstrip("-"), word)) if option else _without_secret(word)


def _without_secret(word: str) -> str:
    """Redact a word of a command line. The key in `key=value` decides whether the value is a secret."""
    key, separator, value = word.partition("=")
    name = key.lstrip("+~-")
    if not separator or not is_private_name(name):
        return redact_text(word)
    return f"{key}={redact(name, value)}"


def _printable(text: str) -> str:
    """The text in one line of printable characters."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())
