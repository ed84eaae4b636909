"""A report: sections of findings, their sum, and the facts they rest on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from azureml_strategy.network.findings import Finding, Verdict

_WORST_FIRST: tuple[Verdict, ...] = ("problem", "warning", "ok")


@dataclass(frozen=True)
class Section:
    """Findings under one heading.

    Attributes:
        title: the heading.
        findings: in the order in which they are shown.
    """

    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        sections: those that have findings.
        facts: what was read, fit for JSON.
    """

    sections: tuple[Section, ...]
    facts: Mapping[str, Any]

    @property
    def findings(self) -> Iterator[Finding]:
        """All findings."""
        return (finding for section in self.sections for finding in section.findings)

    @property
    def verdict(self) -> Verdict:
        """The worst of all findings."""
        return min((finding.verdict for finding in self.findings), key=_WORST_FIRST.index, default="ok")

    @property
    def summary(self) -> str:
        """Such as `2 problems, 1 warning`."""
        verdicts = [finding.verdict for finding in self.findings]
        problems, warnings = verdicts.count("problem"), verdicts.count("warning")
        parts = [_count(problems, "problem")] + [_count(warnings, "warning")] * bool(warnings)
        return ", ".join(parts)

    @property
    def exit_code(self) -> int:
        """1 if there is a problem, else 0."""
        return int(self.verdict == "problem")

    def to_json(self) -> str:
        """The report as a document: `verdict`, `summary`, `checks`, and each of the facts by its name."""
        checks = [
            {"section": section.title, **asdict(finding)} for section in self.sections for finding in section.findings
        ]
        return json.dumps({"verdict": self.verdict, "summary": self.summary, "checks": checks, **self.facts}, indent=2)


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"
