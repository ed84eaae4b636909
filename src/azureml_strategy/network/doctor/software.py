"""Checks of the software: versions, and whether MLflow can be reached."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from azureml_strategy.network.doctor.facts import Facts
from azureml_strategy.network.findings import Finding

_NUMBER = re.compile(r"(\d+)\.(\d+)")
# As in pyproject.toml.
_OLDEST = {"torch": (2, 6), "lightning": (2, 6), "mlflow": (2, 19)}
_MLFLOW_BEYOND_AZURE = (3, 16)

# What is shown, and the distributions that have it.
_DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "azureml-strategy": ("azureml-strategy",),
    "torch": ("torch",),
    "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "lightning": ("lightning",),
    "deepspeed": ("deepspeed",),
    "mlflow": ("mlflow",),
    "azureml-mlflow": ("azureml-mlflow",),
}


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


def installed_versions() -> dict[str, str | None]:
    """Version of Python and of each package; None where it is not installed.

    CUDA and NCCL are those that pip installed beside torch; a build that has them inside, as conda's, shows none.
    """
    found = {name: _first(distributions) for name, distributions in _DISTRIBUTIONS.items()}
    return {"python": platform.python_version(), **found}


def _first(distributions: tuple[str, ...]) -> str | None:
    return next(filter(None, map(_version, distributions)), None)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_tracking(facts: Facts) -> Iterator[Finding]:
    """The tracking store, of which only the scheme is shown, and the run."""
    uri, run_id = facts.environ.get("MLFLOW_TRACKING_URI", ""), facts.environ.get("MLFLOW_RUN_ID")
    scheme = uri.partition(":")[0]
    if scheme == "azureml" and not facts.versions["azureml-mlflow"]:
        yield Finding(
            "problem",
            "tracking",
            "MLFLOW_TRACKING_URI begins with azureml:, which MLflow understands only with azureml-mlflow.",
            "pip install 'azureml-strategy[azure]'",
        )
    elif not facts.job:
        yield Finding("ok", "tracking", f"{scheme} store" if uri else "mlflow.db in the working directory")
    elif uri and run_id:
        yield Finding("ok", "tracking", f"{scheme} store, run {run_id}")
    else:
        missing = " and ".join(name for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID") if not facts.environ.get(name))
        yield Finding(
            "warning",
            "tracking",
            f"{missing} not set, as Azure ML does in a job: metrics do not reach the job's own run.",
            "See what removes it: the command, a wrapper script, or sudo.",
        )
