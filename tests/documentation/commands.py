"""What becomes of a command that a page shows: it runs, runs with --dry-run, or is left alone for a reason."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from azureml_strategy.training.recipes import shipped_recipes

# Where the reader has a name of their own.
_PLACEHOLDER = re.compile(
    r"(?<!\$)\b(JOB|RUN\d?|FOLDER|TRACE|CONTAINER|ACCOUNT|IMAGE|CHECKPOINT|SUBSCRIPTION|YOU|IDENTITY)\b"
)
_NEEDS_AZURE = {
    *(("jobs", each) for each in ("list", "show", "logs", "cancel", "download")),
    *(("cluster", each) for each in ("show", "delete")),
    *(("workspace", "show"), ("model", "register")),
}
_DRY = {
    *(("submit",), ("workspace", "create"), ("cluster", "create"), ("environment", "build"), ("model", "deploy")),
    *(("data", each) for each in ("upload", "register", "attach")),
}
_OTHERS = {
    "make": "it is the test run itself, or longer",
    "pip": "make release-check installs the wheel with each extra",
    "git": "it needs the network",
    "az": "it needs an account",
    "azcopy": "it needs an account",
    "curl": "it needs the network",
    "sudo": "it needs root; tests/emulator and tests/bench run isolated nodes",
}
# A few batches show that a training takes the command; its result is another test's.
_SHORT = {
    "trainer.max_epochs": "1",
    "trainer.limit_train_batches": "2",
    "trainer.limit_val_batches": "1",
    "trainer.num_sanity_val_steps": "0",
}
_SMALL_IMAGES = {"data.batch_size": "2", "data.image_size": "32", "data.num_workers": "0"}
_TWO_CLASSES = {"num_classes": "2"}
# Lines that cannot be as they stand, by a part of them.
_NOT_HERE = {
    "step=400.ckpt": "the checkpoint is of a longer run; tests/training/test_resume.py names one",
    "strategy report ": "it names a run of the reader's; tests/cli/test_report.py makes one",
    "model=gpt_": "it is for GPUs",
    "sequence_parallel_size=4": "it is for a job of four processes",
    "profile.ranks=0,8": "it is for a job of nine processes or more",
    "az://": "it needs Blob Storage; tests/data reads from Azurite",
    "completion fish": "it is for another shell; tests/cli/test_completion.py asks each",
    "completion zsh": "it is for another shell; tests/cli/test_completion.py asks each",
}


@dataclass(frozen=True)
class Command:
    """A line of a page.

    Attributes:
        line: as the page shows it.
        runs: what the shell gets; empty if it does not run.
        reason: why it does not run, or not as it is.
    """

    line: str
    runs: str = ""
    reason: str = ""


def lines(block: str) -> list[str]:
    """The commands of a block of shell lines, without comments."""
    joined = block.replace("\\\n", " ").splitlines()
    return [each for each in (re.split(r"\s#", line)[0].strip() for line in joined) if each and each[0] != "#"]


def command(line: str) -> Command:
    """Decide what becomes of a line."""
    words = shlex.split(line)
    if reason := next((reason for part, reason in _NOT_HERE.items() if part in line), ""):
        return Command(line, reason=reason)
    if words[0] in _OTHERS:
        return Command(line, reason=_OTHERS[words[0]])
    if re.fullmatch(r"[A-Z]+=.*", words[0]) or words[0] in ("cd", "eval"):
        return Command(line, runs=line)
    if words[0] not in ("azureml-strategy", "python"):
        return Command(line, reason=f"{words[0]} is not ours")
    if words[0] == "azureml-strategy" and (dry := _dry(words)):
        return dry
    if _PLACEHOLDER.search(line):
        return Command(line, reason="a word in capitals is the reader's own")
    if words[0] == "azureml-strategy" and (reason := _azure(words)):
        return Command(line, reason=reason)
    return Command(line, runs=_in_job(_short(words, line)))


def _dry(words: list[str]) -> Command | None:
    """The command with --dry-run, where its verb has that."""
    if (words[1],) not in _DRY and tuple(words[1:3]) not in _DRY:
        return None
    end = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[:end] if word not in ("--follow", "--dry-run", "--check")]
    dry = [*kept, "--dry-run", *words[end:]]
    text = " ".join(word if word.startswith("$IMAGE") else shlex.quote(word) for word in dry)
    return Command(shlex.join(words), runs=text, reason="with --dry-run")


def _azure(words: list[str]) -> str:
    verb = tuple(words[1:3])
    remote = "cluster=" in " ".join(words) and words[1] in ("study", "train")
    if (
        verb in _NEEDS_AZURE
        or remote
        or "azureml" in words
        or (verb == ("data", "show") and "/" not in " ".join(words))
    ):
        return "it needs an account; tests/jobs runs it against a service that plays Azure"
    return ""


def _short(words: list[str], line: str) -> str:
    """A training of a shipped recipe with few batches, added where the page does not say how many."""
    recipes = {recipe.name for recipe in shipped_recipes()} & set(words)
    if words[1] == "bench" or words[-1] == "bench":
        return f"{line} --sizes 64KB"
    if not recipes or not {"train", "tune", "study"} & set(words):
        return line
    images = any("resnet50" in recipe for recipe in recipes) and "data._target_=" not in line
    extra = ({} if "tune" in words else _SHORT) | (_SMALL_IMAGES if images else {})
    extra |= _TWO_CLASSES if "data.root=" in line and images else {}
    extra |= {"trainer.limit_train_batches": "9"} if "study" in words else {}  # more than its warm-up
    given = {word.partition("=")[0] for word in words}
    return " ".join([line, *(f"{key}={value}" for key, value in extra.items() if key not in given)])


def _in_job(line: str) -> str:
    """`bench` and `tune` are commands of a job: an emulated one, here."""
    alone = line.startswith(("azureml-strategy bench", "azureml-strategy tune"))
    return f"azureml-strategy emulate --nodes 2 -- {line}" if alone else line
