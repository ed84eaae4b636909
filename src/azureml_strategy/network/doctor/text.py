"""A report for a terminal or a log."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from azureml_strategy.network.doctor.report import Report
from azureml_strategy.network.findings import Finding

_MARKS = {"ok": "ok", "warning": "WARNING", "problem": "PROBLEM"}
_MARK_WIDTH = max(map(len, _MARKS.values()))
# A longer subject, which a variable with its value may be, gets a line of its own.
_WIDEST_SUBJECT = 22
_NARROWEST_TEXT = 30


def render(report: Report, width: int) -> str:
    """The report as aligned lines, the sum last.

    Args:
        report: what was found.
        width: columns to wrap at.
    """
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
    # What is to be typed must stay whole.
    return textwrap.wrap(
        prefix + text,
        max(width, _NARROWEST_TEXT),
        subsequent_indent=" " * len(prefix),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]
