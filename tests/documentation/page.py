"""Run a page's blocks from top to bottom, as a reader does, in an empty folder.

`python -m tests.documentation.page PAGE` does it. Python and YAML blocks whose first line is a comment with a file's
name are written to that file. Other Python blocks are executed, with the names of `world.py` at hand. Lines of shell
blocks are run as `commands.py` says. Sybil reads the page: `<!--- skip: next "reason" --->` leaves a block out, and
`<!--- invisible-code-block: python` is code that no reader sees.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import SkipTest

from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser
from sybil.region import Lexeme
from tests.documentation.commands import command, lines
from tests.documentation.world import PLACES, build, names

_FILE = re.compile(r"# ([\w/]+\.(?:py|yaml))\b")
_TIMEOUT = 240.0


class Reader:
    """Someone who types what a page shows, in one shell and one Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: list[dict[str, str]] = []
        self._python = PythonEvaluator()
        self._variables = _environment()  # as it is now: Python blocks may start a process group, and set variables

    def python(self, example: Example) -> None:
        """Execute a block, or write it to the file that its first line names."""
        if not self.write(example):
            code = example.parsed
            example.parsed = Lexeme(_here(code, self.folder), code.offset, code.line_offset)
            self._python(example)

    def write(self, example: Example) -> bool:
        """Write a block to the file that its first line names; whether it names one."""
        named = _FILE.match(example.parsed)
        if named:
            path = Path(named[1])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_here(example.parsed, self.folder))
        return named is not None

    def yaml(self, example: Example) -> None:
        """Write a block to its file, or at least read it."""
        import yaml

        if not self.write(example):
            yaml.safe_load(example.parsed)

    def shell(self, example: Example) -> None:
        """Run the lines of a block one by one."""
        for line in lines(example.parsed):
            self.type(line)

    def type(self, line: str) -> None:
        """Run one line."""
        planned = command(line)
        self.told.append({"line": line, "ran": planned.runs, "reason": planned.reason})
        if re.fullmatch(r"[A-Z]+=\S+", planned.runs):
            name, _, value = planned.runs.partition("=")
            self._variables[name] = value
        elif planned.runs.startswith("cd "):
            os.chdir(planned.runs.removeprefix("cd "))
        elif planned.runs:
            self._run(_here(planned.runs, self.folder))

    def _run(self, line: str) -> None:
        done = subprocess.run(
            ["bash", "-c", line],
            env=self._variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
        if done.returncode not in _allowed(line):
            raise AssertionError(f"{line}\nended with {done.returncode}:\n{done.stdout[-6000:]}")


def _allowed(line: str) -> tuple[int, ...]:
    """`doctor` ends with 1 where it finds a problem, and this machine may have one."""
    return (0, 1) if " doctor" in line else (0,)


def _here(text: str, folder: Path) -> str:
    """The text with the reader's folders, such as /data, in this one."""
    return re.sub(rf"(?<![\w.:/])/({'|'.join(PLACES)})(?=/)", rf"{folder}/\1", text)


def _environment() -> dict[str, str]:
    """The commands are those of this Python, without the tests on their path."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OUTSIDE_PATH")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    outside = {"PYTHONPATH": os.environ["OUTSIDE_PATH"]} if os.environ.get("OUTSIDE_PATH") else {}
    return inherited | outside | {"PATH": path, "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db", "WANDB_MODE": "offline"}


def run(page: Path) -> Reader:
    """Run the page in the current folder.

    Raises:
        AssertionError: a command failed.
    """
    reader = Reader(Path.cwd())
    build(page, reader.folder)
    parsers = [
        CodeBlockParser("python", reader.python),
        CodeBlockParser("yaml", reader.yaml),
        CodeBlockParser("bash", reader.shell),
        SkipParser(),
    ]
    document = Sybil(parsers).parse(page)
    if re.search(r"^```python", page.read_text(), re.M):
        document.namespace.update(names())
    for example in document.examples():
        try:
            example.evaluate()
        except SkipTest as skipped:
            reader.told.append({"line": f"line {example.line}", "ran": "", "reason": str(skipped)})
    return reader


def main(arguments: list[str]) -> Any:
    """Run one page, and print as JSON what became of its commands."""
    print(json.dumps(run(Path(arguments[0])).told))


if __name__ == "__main__":
    main(sys.argv[1:])
