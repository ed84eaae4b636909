"""The report of a machine and its job: all checks in order, rendered as text or JSON, with secrets removed."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from azureml_strategy.cluster.redaction import redact
from azureml_strategy.network.doctor.disks import check_limits, check_storage
from azureml_strategy.network.doctor.facts import Facts, read_facts
from azureml_strategy.network.doctor.machine import check_adapters, check_gpus, check_size
from azureml_strategy.network.doctor.software import (
    check_launch,
    check_settings,
    check_tracking,
    check_versions,
    installed_versions,
)
from azureml_strategy.network.findings import Finding, Verdict

_WORST_FIRST: tuple[Verdict, ...] = ("problem", "warning", "ok")

# A log may contain escape sequences, which a terminal would execute.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_MARKS = {"ok": "ok", "warning": "WARNING", "problem": "PROBLEM"}
_MARK_WIDTH = max(map(len, _MARKS.values()))
# A longer subject, such as a variable with its value, gets a line of its own.
_WIDEST_SUBJECT = 22
_NARROWEST_TEXT = 30


@dataclass(frozen=True)
class Section:
    """Findings under one heading, in the order shown."""

    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Report:
    """The sections that have findings, and the facts from which these follow, in a form that JSON can hold."""

    sections: tuple[Section, ...]
    facts: Mapping[str, Any]

    @property
    def findings(self) -> Iterator[Finding]:
        """The findings of all sections."""
        return (finding for section in self.sections for finding in section.findings)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all findings; `ok` without findings."""
        return min((finding.verdict for finding in self.findings), key=_WORST_FIRST.index, default="ok")

    @property
    def summary(self) -> str:
        """The number of problems and warnings, such as `2 problems, 1 warning`."""
        verdicts = [finding.verdict for finding in self.findings]
        problems, warnings = verdicts.count("problem"), verdicts.count("warning")
        text = _count(problems, "problem")
        return f"{text}, {_count(warnings, 'warning')}" if warnings else text

    @property
    def exit_code(self) -> int:
        """1 if there is a problem, else 0."""
        return int(self.verdict == "problem")

    def to_json(self) -> str:
        """The report as a JSON document: `verdict`, `summary`, `checks`, and each fact by its name."""
        checks = [
            {"section": section.title, **asdict(finding)} for section in self.sections for finding in section.findings
        ]
        return json.dumps({"verdict": self.verdict, "summary": self.summary, "checks": checks, **self.facts}, indent=2)


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"


def without_secrets(report: Report, environ: Mapping[str, str]) -> Report:
    """The report without everything that looks like a secret, and without the values of variables with secret names."""

    def without(finding: Finding) -> Finding:
        texts = (printable(text, environ) for text in (finding.subject, finding.text, finding.advice))
        return Finding(finding.verdict, *texts)

    sections = [Section(section.title, tuple(map(without, section.findings))) for section in report.sections]
    return Report(tuple(sections), printable(report.facts, environ))


def printable(value: Any, environ: Mapping[str, str]) -> Any:
    """The text, or list or dictionary of texts, without secrets and without terminal control characters."""
    return _plain(redact("", value, environ))


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        # The value of a variable that is not UTF-8 holds surrogates, which cannot be printed.
        return _CONTROL.sub(" ", value).encode(errors="replace").decode()
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


def render(report: Report, width: int) -> str:
    """The report as aligned lines that wrap at a column, with the summary last."""
    subjects = [len(finding.subject) for finding in report.findings]
    column = max((length for length in subjects if length <= _WIDEST_SUBJECT), default=0)
    lines = []
    for section in report.sections:
        lines += [section.title, *(line for finding in section.findings for line in _entry(finding, column, width)), ""]
    return "\n".join([*lines, report.summary])


def _entry(finding: Finding, column: int, width: int) -> Iterator[str]:
    head = f"  {_MARKS[finding.verdict]:{_MARK_WIDTH}}  {finding.subject:{column}}  "
    indent = _MARK_WIDTH + column + 6
    body = _wrap(finding.text, width - indent, "")
    if finding.advice:
        body += _wrap(finding.advice, width - indent, "-> ")
    if len(head) > indent:
        yield head.rstrip()
    else:
        yield head + body.pop(0)
    yield from (" " * indent + line for line in body)


def _wrap(text: str, width: int, prefix: str) -> list[str]:
    # Never break a word: the user may have to copy a command or setting.
    return textwrap.wrap(
        prefix + text,
        max(width, _NARROWEST_TEXT),
        subsequent_indent=" " * len(prefix),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


_SECTIONS: tuple[tuple[str, tuple[Callable[[Facts], Iterable[Finding]], ...]], ...] = (
    ("Job", (check_launch, check_tracking)),
    ("Machine", (check_size, check_gpus, check_limits)),
    ("Network", (check_adapters,)),
    ("Settings", (check_settings,)),
    ("Software", (check_versions,)),
    ("Storage", (check_storage,)),
)


def examine(
    root: str | Path = "/",
    environ: Mapping[str, str] | None = None,
    versions: Mapping[str, str | None] | None = None,
) -> Report:
    """Examine this machine, and the job if this process belongs to one, without changing anything.

    `root` is the folder that holds `sys`, `proc`, `dev`, `etc` and the rest. Variables and versions of packages are
    those of this process by default.
    """
    environ = os.environ if environ is None else environ
    facts = read_facts(Path(root), environ, installed_versions() if versions is None else versions)
    sections = (
        Section(title, tuple(finding for check in checks for finding in check(facts))) for title, checks in _SECTIONS
    )
    report = Report(tuple(section for section in sections if section.findings), facts.to_json())
    return without_secrets(report, environ)
