"""Reads requirements files as pip does: what they name, and which files they refer to."""

from __future__ import annotations

import argparse
import codecs
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import requires, version
from pathlib import Path
from typing import NoReturn

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from azureml_strategy.cluster.redaction import is_secret
from azureml_strategy.jobs.image import EXTRA, PACKAGE, shipped_constraints
from azureml_strategy.jobs.service_errors import JobError

_COMMENT = re.compile(r"(^|\s+)#.*$")  # as in pip/_internal/req/req_file.py
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]+:")
_BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_IMAGE = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}  # where markers are evaluated


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@cache
def _parser() -> argparse.ArgumentParser:
    """The options of a line that matter here. Like pip's own parser, argparse takes shortened names."""
    parser = _Parser(add_help=False)
    for names in (("-r", "--requirement"), ("-c", "--constraint"), ("-e", "--editable"), ("-f", "--find-links")):
        parser.add_argument(*names, action="append", default=[])
    parser.add_argument("-i", "--index-url", "--pypi-url")
    parser.add_argument("--hash")
    parser.add_argument("--require-hashes", action="store_true")
    # The others are here so that a shortened name is as ambiguous as it is for pip, and so that their
    # values are not taken for requirements.
    for name in ("--extra-index-url", "--no-binary", "--only-binary", "--trusted-host", "--use-feature"):
        parser.add_argument(name)
    for name in ("--no-index", "--prefer-binary", "--pre"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--global-option")
    parser.add_argument("-C", "--config-settings")
    return parser


@dataclass(frozen=True)
class Line:
    """A logical line of a requirements file.

    Attributes:
        place: the file and the number of the first line.
        requirement: what it asks for, without options; may be empty.
    """

    place: str
    requirement: str
    options: argparse.Namespace


def read_text(path: Path) -> str:
    """Read a text of UTF-8, or of UTF-16 with its mark, as PowerShell writes one.

    Raises:
        JobError: the file cannot be read, or is no text.
    """
    try:
        content = path.read_bytes()
        encoding = next((name for mark, name in _BOMS.items() if content.startswith(mark)), "utf-8")
        return content.decode(encoding)
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{path} cannot be read as text: {error}. Save it as UTF-8.") from error


def refuse_secret_lines(name: str, text: str) -> None:
    """Refuse a file with a secret, before an image carries it.

    Raises:
        JobError: a line holds a secret. The message names the line and does not repeat it.
    """
    for number, line in enumerate(text.splitlines(), 1):
        if is_secret("", line):
            raise JobError(
                f"{name}, line {number}, looks like it holds a secret, so that no job was made: everybody with access "
                "to the workspace can read how its images are built, and a user name before @ counts too. Take it out. "
                "A private package can be a wheel in the folder of code: write its path, ./wheels/NAME.whl."
            )


def read_lines(name: str, text: str) -> Iterator[Line]:
    """Yield the lines of a requirements file: joined, without comments, and parted from their options.

    Raises:
        JobError: the options of a line cannot be read.
    """
    for number, joined in _join_lines(text):
        line = _COMMENT.sub("", joined).strip()
        if not line:
            continue
        tokens = line.split(" ")
        first = next((index for index, token in enumerate(tokens) if token.startswith("-")), len(tokens))
        try:
            options, _ = _parser().parse_known_args(shlex.split(" ".join(tokens[first:])))
        except ValueError as error:
            raise JobError(f"{name}, line {number}, cannot be read: {error}.") from error
        yield Line(f"{name}, line {number}", " ".join(tokens[:first]).strip(), options)


def _join_lines(text: str) -> Iterator[tuple[int, str]]:
    """Join each line that ends in a backslash with the next one, as pip does."""
    parts: list[str] = []
    begin = 1
    for number, line in enumerate(text.splitlines(), 1):
        begin = begin if parts else number
        comment = _COMMENT.match(line)
        if line.endswith("\\") and not comment:
            parts.append(line.strip("\\"))
            continue
        yield begin, "".join([*parts, f" {line}" if comment else line])
        parts = []
    if parts:
        yield begin, "".join(parts)


@dataclass
class Requirements:
    """What a requirements file and those that it refers to ask for.

    Attributes:
        root: the folder that may be copied into an image.
        base: the folder in which pip runs.
        texts: the requirements and constraints files by their path below the root.
        copied: other files and folders that pip needs, as paths below the root.
        packages: each package by the place that names it, constraints too.
        hashed: whether pip checks hashes, and then takes no package without one.
        index: the address in place of PyPI; None if there is none.
        constrained: whether it names a file of constraints.
    """

    root: Path
    base: Path
    texts: dict[str, Path] = field(default_factory=dict)
    copied: set[str] = field(default_factory=set)
    packages: dict[str, Requirement] = field(default_factory=dict)
    hashed: bool = False
    index: str | None = None
    constrained: bool = False

    def read(self, path: Path) -> None:
        """Read a file, and each one that it includes.

        Raises:
            JobError: a file is missing, lies outside of the root, holds a secret, or has a line that pip refuses.
        """
        below = self.inside(path, str(path))
        if below not in self.texts:
            self.texts[below] = path
            text = read_text(path)
            refuse_secret_lines(below, text)
            self.read_all(read_lines(below, text), path.parent)

    def read_all(self, lines: Iterable[Line], folder: Path) -> None:
        """Take the lines of a file in a folder."""
        for line in lines:
            options = line.options
            self.hashed = self.hashed or bool(options.hash) or options.require_hashes
            self.index = options.index_url or self.index
            self.constrained = self.constrained or bool(options.constraint)
            if line.requirement:
                self._take(line, line.requirement)
            # Of several in a line, pip takes the first.
            for path in options.editable[:1]:
                self._take(line, path)
            for path in (options.requirement or options.constraint)[:1]:
                if not _ADDRESS.match(path):
                    self.read(self._existing(line, folder / path))
            for path in options.find_links[:1]:
                if not _ADDRESS.match(path):
                    self._copy(line, folder / path if (folder / path).exists() else self.base / path)

    def tested_pins(self) -> list[str]:
        """The tested versions of what the files name without one, such as `torch==2.13.0`; none if they pin anything.

        Otherwise the same file would give another image each month. Who pins a version, or names constraints, hashes or
        an index, has chosen, and a version of ours might not go with it.
        """
        chosen = any(each.operator in ("==", "===") for one in self.packages.values() for each in one.specifier)
        if chosen or self.constrained or self.hashed or self.index:
            return []
        return sorted(
            {
                str(pin)
                for each in self.packages.values()
                if (pin := _tested_versions().get(canonicalize_name(each.name))) is not None
                and each.url is None
                and all(each.specifier.contains(one.version, prereleases=True) for one in pin.specifier)
            }
        )

    def inside(self, path: Path, place: str) -> str:
        """The path below the root, with slashes.

        Raises:
            JobError: it is outside of the root.
        """
        path = Path(os.path.normpath(path))
        below = os.path.relpath(path, self.root)
        if below.split(os.sep)[0] == os.pardir:
            raise JobError(
                f"{place}: {path} lies outside of {self.root}, which is all that the build of the image gets. Move it "
                "there, or name a folder above both: job.code=FOLDER."
            )
        return Path(below).as_posix()

    def _take(self, line: Line, text: str) -> None:
        """Take one requirement: a package, an address, or a path relative to where pip runs."""
        try:
            package = Requirement(text)
        except InvalidRequirement as error:
            if _ADDRESS.match(text) or "${" in text:
                _refuse_local(line, text)
                return
            path = re.sub(r"\[[^\]]*\]$", "", re.split(r"\s;|;\s", text)[0].strip())
            if "/" not in path and not path.startswith(".") and not (self.base / path).exists():
                why = str(error).splitlines()[0].rstrip(".")
                raise JobError(f"{line.place}: {text!r} is no requirement: {why}.") from error
            self._copy(line, self.base / path)
            return
        _refuse_local(line, package.url or "")
        self.packages[f"{line.place}: {text}"] = package

    def _copy(self, line: Line, path: Path) -> None:
        self.copied.add(self.inside(self._existing(line, path), line.place))

    def _existing(self, line: Line, path: Path) -> Path:
        self.inside(path, line.place)
        if not path.exists():
            raise JobError(f"{line.place}: there is no {os.path.normpath(path)}.")
        return Path(os.path.normpath(path))


def _refuse_local(line: Line, address: str) -> None:
    if address.startswith("file:"):
        raise JobError(
            f"{line.place}: {address} is a place on this machine. Name a version (`pip list --format=freeze` shows "
            "those that are installed here), or a path relative to the file: ./wheels/NAME.whl."
        )


@cache
def _tested_versions() -> dict[str, Requirement]:
    """The tested versions of our own image, by name."""
    lines = read_lines("constraints.txt", shipped_constraints())
    pins = (Requirement(line.requirement) for line in lines)
    fitting = [each for each in pins if each.marker is None or each.marker.evaluate(dict(_IMAGE))]
    return {canonicalize_name(each.name): Requirement(f"{each.name}{each.specifier}") for each in fitting}


@cache
def _own_requirements() -> dict[str, Requirement]:
    """What the package itself needs in a job, by name."""
    found = (Requirement(text) for text in requires(PACKAGE) or [])
    needed = (each for each in found if each.marker is None or each.marker.evaluate({"extra": EXTRA}))
    own: dict[str, Requirement] = {canonicalize_name(each.name): each for each in needed}
    return {**own, PACKAGE: Requirement(f"{PACKAGE}=={version(PACKAGE)}")}


def refuse_unfit(packages: dict[str, Requirement]) -> None:
    """Refuse a pinned version that this package cannot work with, before an image is built for minutes.

    Each package comes with the place that names it.

    Raises:
        JobError: a version is pinned that no installation with this package can have.
    """
    for place, package in packages.items():
        own = _own_requirements().get(canonicalize_name(package.name))
        if own is None or (package.marker and not package.marker.evaluate(dict(_IMAGE))):
            continue
        pinned = [
            each.version for each in package.specifier if each.operator == "==" and not each.version.endswith("*")
        ]
        if any(not own.specifier.contains(each, prereleases=True) for each in pinned):
            raise JobError(
                f"{place}: a job runs with {PACKAGE} {version(PACKAGE)}, the version that submits, which needs {own}. "
                f"Write {own.name} without a version, or one that fits."
            )
