"""Runs all checks of a machine and its job, in the order of the report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from azureml_strategy.network.doctor.disks import check_limits, check_storage
from azureml_strategy.network.doctor.facts import Facts, read_facts
from azureml_strategy.network.doctor.machine import check_adapters, check_gpus, check_size
from azureml_strategy.network.doctor.report import Report, Section, without_secrets
from azureml_strategy.network.doctor.software import check_tracking, check_versions, installed_versions
from azureml_strategy.network.doctor.variables import check_launch, check_settings
from azureml_strategy.network.findings import Finding

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

    Args:
        root: the folder that holds `sys`, `proc`, `dev`, `etc` and the rest.
        environ: environment variables; those of this process by default.
        versions: version of each package; those installed here by default.
    """
    environ = os.environ if environ is None else environ
    facts = read_facts(Path(root), environ, installed_versions() if versions is None else versions)
    sections = (
        Section(title, tuple(finding for check in checks for finding in check(facts))) for title, checks in _SECTIONS
    )
    report = Report(tuple(section for section in sections if section.findings), facts.to_json())
    return without_secrets(report, environ)
