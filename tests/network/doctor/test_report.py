"""Verdict, sum, exit code and document of a report."""

from __future__ import annotations

import json

import pytest

from azureml_strategy.network.doctor.report import Report, Section
from azureml_strategy.network.findings import Finding, Verdict


def report(*verdicts: Verdict) -> Report:
    findings = tuple(Finding(verdict, "subject", "text", "advice") for verdict in verdicts)
    return Report((Section("One", findings[:1]), Section("Two", findings[1:])), {"node": {"gpus": 8}})


@pytest.mark.parametrize(
    ("verdicts", "verdict", "summary", "exit_code"),
    [
        ((), "ok", "no problems", 0),
        (("ok", "ok"), "ok", "no problems", 0),
        (("ok", "warning"), "warning", "no problems, 1 warning", 0),
        (("problem",), "problem", "1 problem", 1),
        (("warning", "problem", "problem", "warning"), "problem", "2 problems, 2 warnings", 1),
    ],
)
def test_the_worst_finding_decides(verdicts: tuple[Verdict, ...], verdict: str, summary: str, exit_code: int) -> None:
    found = report(*verdicts)
    assert (found.verdict, found.summary, found.exit_code) == (verdict, summary, exit_code)


def test_the_document_has_checks_and_facts() -> None:
    document = json.loads(report("ok", "problem").to_json())
    assert document == {
        "verdict": "problem",
        "summary": "1 problem",
        "checks": [
            {"section": "One", "verdict": "ok", "subject": "subject", "text": "text", "advice": "advice"},
            {"section": "Two", "verdict": "problem", "subject": "subject", "text": "text", "advice": "advice"},
        ],
        "node": {"gpus": 8},
    }
