"""Keeping secrets out of a report, wherever they may stand in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from azureml_strategy.cluster.redaction import redact
from azureml_strategy.network.doctor.report import Report, Section

# A log may hold escape sequences, which a terminal would obey.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


def without_secrets(report: Report, environ: Mapping[str, str]) -> Report:
    """The report, fit to print and to pass on.

    Args:
        report: what was found.
        environ: what its variables with secret names hold is struck out, besides what looks like a secret.
    """
    sections = tuple(
        Section(
            section.title,
            tuple(
                replace(
                    finding,
                    subject=printable(finding.subject, environ),
                    text=printable(finding.text, environ),
                    advice=printable(finding.advice, environ),
                )
                for finding in section.findings
            ),
        )
        for section in report.sections
    )
    return Report(sections, printable(report.facts, environ))


def printable(value: Any, environ: Mapping[str, str]) -> Any:
    """The same text, or list or dictionary of texts, without secrets and without what a terminal would obey."""
    return _plain(redact("", value, environ))


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        # A variable that is no UTF-8 cannot be printed as it is.
        return _CONTROL.sub(" ", value).encode(errors="replace").decode()
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value
