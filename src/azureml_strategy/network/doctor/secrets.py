"""Keeping secrets out of a report, wherever they may stand in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from azureml_strategy.cluster.redaction import REDACTED, redact, redact_text
from azureml_strategy.network.doctor.report import Report, Section

# Below this length a value is a flag or a number, which would be struck out of words that have nothing to do with it.
_SHORTEST_SECRET = 8
# A log may hold escape sequences, which a terminal would obey.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


class Secrets:
    """The secrets that this process's environment holds.

    Args:
        environ: values of variables whose names say that they are secret are struck out, besides what looks like a
            secret by its form.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        safe = redact(environ)
        values = {value for name, value in environ.items() if safe[name] == REDACTED}
        long = sorted((value for value in values if len(value) >= _SHORTEST_SECRET), key=len, reverse=True)
        self._values = re.compile("|".join(map(re.escape, long))) if long else None

    def hide(self, value: Any) -> Any:
        """The same text, or list or dictionary of texts, without them."""
        if isinstance(value, str):
            text = redact_text(self._values.sub(REDACTED, value) if self._values else value)
            # A variable that is no UTF-8 cannot be printed as it is.
            return _CONTROL.sub(" ", text).encode(errors="replace").decode()
        if isinstance(value, Mapping):
            return {name: self.hide(entry) for name, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(entry) for entry in value]
        return value

    def hide_in(self, report: Report) -> Report:
        """The report without them."""
        sections = tuple(
            Section(
                section.title,
                tuple(
                    replace(
                        finding,
                        subject=self.hide(finding.subject),
                        text=self.hide(finding.text),
                        advice=self.hide(finding.advice),
                    )
                    for finding in section.findings
                ),
            )
            for section in report.sections
        )
        return Report(sections, self.hide(report.facts))
