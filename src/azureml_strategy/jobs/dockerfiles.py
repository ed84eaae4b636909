"""Adds this package to a user's Dockerfile, and finds what of its folder the build needs."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from azureml_strategy.cluster.redaction import is_secret
from azureml_strategy.jobs.image import PLACE, adding_lines, copy_file, write_wheel
from azureml_strategy.jobs.requirements import read_text, refuse_secret_lines
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.jobs.snapshot import list_snapshot

_COMMENT = re.compile(r"\s*(#|$)")
_ESCAPE = re.compile(r"#\s*escape\s*=\s*(\S)", re.I)
_HEREDOC = re.compile(r"(?<!<)<<-?([\"']?)(\w+)\1")
_FLAGS = re.compile(r"(?:--\S+\s+)*")
_VARIABLE = re.compile(r"(\w+)=(\"[^\"]*\"|'[^']*'|\S*)")
_ELSEWHERE = re.compile(r"\w+://|git@|<<")
_EVERYTHING = "."
# The rules in these files were applied when the code was listed. azure-ai-ml would apply them again to the copy.
_IGNORE_FILES = (".gitignore", ".amlignore")


@dataclass(frozen=True)
class Instruction:
    """An instruction of a Dockerfile.

    Attributes:
        keyword: the first word, in capitals; empty if the file ends within the instruction.
        text: what follows, with continuation lines joined.
    """

    keyword: str
    text: str


def write_dockerfile_context(path: Path, folder: Path) -> None:
    """Write a Dockerfile with this package added to its last stage, and the files that it copies.

    Args:
        path: the user's Dockerfile. Its folder is the build context, less what the upload of code leaves out.
        folder: folder that receives all.

    Raises:
        JobError: the file is no whole Dockerfile, or holds or copies a secret.
    """
    text = read_text(path)
    instructions = list(read_instructions(text))
    refuse_secret_lines(path.name, text)
    secrets = secret_variables(instructions)
    if secrets:
        raise JobError(
            f"{path} sets {', '.join(secrets)}, which looks like a secret, so that no job was made: everybody with "
            "access to the workspace can read its images. Take it out."
        )
    if not any(each.keyword == "FROM" for each in instructions):
        raise JobError(f"{path} has no FROM line, so that it is no Dockerfile.")
    if not instructions[-1].keyword:
        raise JobError(f"{path} ends within an instruction: its last line ends in a backslash. Take that out.")
    _copy_context(path, copied_paths(instructions), folder)
    wheel = write_wheel(folder).name
    ignored = folder / ".dockerignore"
    if ignored.is_file():
        ignored.write_text(f"{read_text(ignored)}\n!{wheel}\n", encoding="utf-8")
    user = last_user(instructions)
    lines = [f"COPY {wheel} {PLACE}/", *adding_lines(wheel)]
    lines = ["USER root", *lines, f"USER {user}"] if user else lines
    (folder / "Dockerfile").write_text(f"{text.rstrip()}\n\n" + "\n".join([*lines, ""]), encoding="utf-8")


def _copy_context(path: Path, copied: set[str], folder: Path) -> None:
    if not copied:
        return
    snapshot = list_snapshot(str(path.parent))
    kept = sorted(copied & set(snapshot.secrets))
    if kept:
        raise JobError(
            f"{path} copies {kept[0]}, which looks like a secret by its name and stays here. If it is none, write "
            f"!{kept[0]} into {path.parent}/.amlignore."
        )
    for name in snapshot.files:
        if (is_below(name, copied) or name == ".dockerignore") and name not in _IGNORE_FILES:
            copy_file(path.parent / name, folder / name)


def read_instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions of a Dockerfile. The lines of a heredoc are left out."""
    lines = iter(text.splitlines())
    directive = _ESCAPE.match(text)
    escape = directive[1] if directive else "\\"
    joined = ""
    for line in lines:
        if _COMMENT.match(line):
            continue
        joined += line.rstrip()
        if joined.endswith(escape):
            joined = f"{joined.removesuffix(escape)} "
            continue
        keyword, text = [*joined.split(maxsplit=1), ""][:2]
        joined = ""
        yield Instruction(keyword.upper(), text.strip())
        if keyword.upper() in ("RUN", "COPY", "ADD"):
            for found in _HEREDOC.finditer(text):
                next((line for line in lines if line.strip("\t") == found[2]), None)  # skips to the heredoc's end
    if joined.strip():
        yield Instruction("", joined.strip())


def copied_paths(instructions: Sequence[Instruction]) -> set[str]:
    """The paths and patterns of the context that the image is built from; `.` stands for all of it."""
    found: set[str] = set()
    for each in instructions:
        if each.keyword in ("COPY", "ADD"):
            found.update(_sources(each.text))
        elif each.keyword == "ONBUILD":
            found.add(_EVERYTHING)
        elif each.keyword == "RUN":
            mounts = re.findall(r"--mount=(\S+)", each.text)
            if any("from=" not in mount and ("type=bind" in mount or "type=" not in mount) for mount in mounts):
                found.add(_EVERYTHING)
    return found


def _sources(text: str) -> Iterator[str]:
    """Yield the paths that a COPY or ADD takes from the context: its words without the last, which is the target."""
    flags = _FLAGS.match(text)
    rest = text[flags.end() :] if flags else text
    if "--from=" in text[: len(text) - len(rest)]:
        return
    try:
        words = [str(word) for word in json.loads(rest)] if rest.startswith("[") else rest.split()
    except ValueError:
        words = rest.split()  # a pattern such as [ab].txt
    for word in words[:-1]:
        if not _ELSEWHERE.match(word):
            yield _EVERYTHING if "$" in word else word.removeprefix("./").strip("/") or _EVERYTHING


def is_below(file: str, paths: set[str]) -> bool:
    """Whether a file is one of the paths or patterns, or below one."""
    return any(
        path == _EVERYTHING or fnmatch.fnmatch(file, path) or fnmatch.fnmatch(file, f"{path}/*") for path in paths
    )


def last_user(instructions: Sequence[Instruction]) -> str | None:
    """The user that the last stage ends as; None where the file leaves that to the base image."""
    users: dict[str, str | None] = {}
    user, stage = None, ""
    for each in instructions:
        if each.keyword == "FROM":
            image, *name = [word.lower() for word in each.text.split() if not word.startswith("--")] or [""]
            user, stage = users.get(image), name[-1] if name else ""
        elif each.keyword == "USER":
            user = each.text
        users[stage] = user
    return user


def secret_variables(instructions: Sequence[Instruction]) -> list[str]:
    """The variables of ENV and ARG that hold secrets, by their names or their values."""
    texts = [each.text for each in instructions if each.keyword in ("ENV", "ARG")]
    # The old notation is ENV NAME value.
    pairs = [pair for text in texts for pair in _VARIABLE.findall(text) or [[*text.split(maxsplit=1), ""][:2]]]
    return [name for name, value in pairs if value and is_secret(name, value)]
