"""The settings that our strategies make, those that are there, and what contradicts the hardware."""

from __future__ import annotations

from collections.abc import Iterator

from azureml_strategy.network.doctor.facts import Facts
from azureml_strategy.network.findings import Finding
from azureml_strategy.network.hardware import find_faults


def check_settings(facts: Facts) -> Iterator[Finding]:
    """Each variable with its value and reason; then those that contradict the hardware."""
    for setting in facts.plan.settings:
        yield Finding("ok", setting.variable, f"{setting.value}  {setting.reason}")
    faults = tuple(find_faults(facts.node))
    conflicts = [finding for finding in facts.plan.findings if finding not in faults]
    wrong = {finding.subject.partition("=")[0] for finding in conflicts}
    for setting in facts.plan.kept:
        if setting.variable not in wrong:
            text = f"{setting.value}  Set already, in {_place(setting.source)}; it stays."
            yield Finding("ok", setting.variable, text)
    yield from conflicts


def _place(source: str) -> str:
    return "the environment" if source == "environment" else source
