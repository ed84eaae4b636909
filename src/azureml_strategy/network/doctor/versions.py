"""Packages that are missing, too old, or do not go together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from azureml_strategy.network.doctor.facts import Facts
from azureml_strategy.network.findings import Finding

_NUMBER = re.compile(r"(\d+)\.(\d+)")
# As in pyproject.toml.
_OLDEST = {"torch": (2, 6), "lightning": (2, 6), "mlflow": (2, 19)}
_MLFLOW_BEYOND_AZURE = (3, 16)


def check_versions(facts: Facts) -> Iterator[Finding]:
    """All versions in one line, then what does not go together."""
    versions = facts.versions
    shown = [f"{name} {found}" for name, found in versions.items() if found]
    yield Finding("ok", "versions", ", ".join(shown))
    yield from find_unsupported(versions)


def find_unsupported(versions: Mapping[str, str | None]) -> Iterator[Finding]:
    """Packages that are missing, too old, or do not go together.

    Args:
        versions: from `installed_versions`.
    """
    for name, oldest in _OLDEST.items():
        wanted = ".".join(map(str, oldest))
        found = versions[name]
        if found is None:
            yield Finding("problem", name, "it is not installed.", f"pip install '{name}>={wanted}'")
        elif _number(found) < oldest:
            text = f"{found} is older than {wanted}, with which this package works."
            yield Finding("warning", name, text, f"pip install '{name}>={wanted}'")
    if versions["azureml-mlflow"] and _number(versions["mlflow"]) >= _MLFLOW_BEYOND_AZURE:
        yield Finding(
            "warning",
            "mlflow",
            f"{versions['mlflow']} is newer than what azureml-mlflow {versions['azureml-mlflow']} is tested with here; "
            "logging into the job's run may fail.",
            "pip install 'mlflow<3.16'",
        )


def _number(text: str | None) -> tuple[int, int]:
    """Major and minor version; (0, 0) where there is none."""
    found = _NUMBER.match(text or "")
    return (int(found[1]), int(found[2])) if found else (0, 0)
