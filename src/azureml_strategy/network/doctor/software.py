"""Checks variables and software: launch, job and NCCL settings, package versions, and what MLflow tracking needs."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from azureml_strategy.cluster.environ import in_azure_ml
from azureml_strategy.cluster.job import Job
from azureml_strategy.cluster.launch import UnknownNodesError
from azureml_strategy.lazy import install_line
from azureml_strategy.network.doctor.facts import Facts
from azureml_strategy.network.findings import Finding, find_faults


def check_launch(facts: Facts) -> Iterator[Finding]:
    """Report how the process was launched, and in which job."""
    launch = facts.launch
    if facts.launch_error:
        trains = isinstance(facts.launch_error, UnknownNodesError)
        yield Finding("warning" if trains else "problem", "launch", str(facts.launch_error))
    elif launch:
        yield Finding(
            "ok",
            "launch",
            f"{launch.launcher}: global rank {launch.rank} of {launch.world_size}, local rank {launch.local_rank} of "
            f"{launch.local_world_size}, node {launch.node_rank} of {launch.num_nodes}; rank 0 at "
            f"{launch.main_address}:{launch.main_port}",
        )
    elif in_azure_ml(facts.environ):
        yield Finding("ok", "launch", "one process, without a launcher: Lightning's own defaults hold.")
    else:
        yield Finding("ok", "launch", "not in an Azure ML job: Lightning's own defaults hold.")
    if facts.job:
        yield Finding("ok", "job", _describe_job(facts.job))


def _describe_job(job: Job) -> str:
    """The job without its subscription."""
    parts = {
        "experiment": job.experiment,
        "workspace": job.workspace,
        "compute": job.compute,
        "priority": job.priority,
        "attempt": str(job.attempt + 1),
    }
    return ", ".join([job.run_id, *(f"{name} {value}" for name, value in parts.items() if value)])


def check_settings(facts: Facts) -> Iterator[Finding]:
    """Report each variable with its value and reason, then the variables that contradict the hardware."""
    for setting in facts.plan.settings:
        yield Finding("ok", setting.variable, f"{setting.value}  {setting.reason}")
    faults = tuple(find_faults(facts.node))
    conflicts = [finding for finding in facts.plan.findings if finding not in faults]
    wrong = {finding.subject.partition("=")[0] for finding in conflicts}
    for setting in facts.plan.kept:
        if setting.variable not in wrong:
            source = "the environment" if setting.source == "environment" else setting.source
            yield Finding("ok", setting.variable, f"{setting.value}  Set already, in {source}; it stays.")
    yield from conflicts


_NUMBER = re.compile(r"(\d+)\.(\d+)")
# As in pyproject.toml.
_OLDEST = {"torch": (2, 8), "lightning": (2, 6), "mlflow": (2, 19)}
_MLFLOW_BEYOND_AZURE = (3, 16)

# The name in the report, and the distributions that may provide it.
_DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "azureml-strategy": ("azureml-strategy",),
    "torch": ("torch",),
    "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "lightning": ("lightning",),
    "deepspeed": ("deepspeed",),
    "mlflow": ("mlflow", "mlflow-skinny"),  # a plain install brings the second, which has all that a job needs
    "azureml-mlflow": ("azureml-mlflow",),
}


def check_versions(facts: Facts) -> Iterator[Finding]:
    """Report all versions in one finding, then each unsupported one."""
    versions = facts.versions
    shown = [f"{name} {found}" for name, found in versions.items() if found]
    yield Finding("ok", "versions", ", ".join(shown))
    yield from find_unsupported(versions)


def find_unsupported(versions: Mapping[str, str | None]) -> Iterator[Finding]:
    """Find packages that are missing, too old, or incompatible with one another."""
    for name, oldest in _OLDEST.items():
        wanted = ".".join(map(str, oldest))
        found, advice = versions[name], f"pip install '{name}>={wanted}'"
        if found is None:
            yield Finding("problem", name, "it is not installed.", advice)
        elif _number(found) < oldest:
            yield Finding("warning", name, f"{found} is older than {wanted}, with which this package works.", advice)
    if versions["azureml-mlflow"] and _number(versions["mlflow"]) >= _MLFLOW_BEYOND_AZURE:
        yield Finding(
            "warning",
            "mlflow",
            f"{versions['mlflow']} is newer than what azureml-mlflow {versions['azureml-mlflow']} is tested with here; "
            "logging into the job's run may fail.",
            "pip install 'mlflow<3.16'",
        )


def _number(text: str | None) -> tuple[int, int]:
    """Major and minor version; (0, 0) if there is none."""
    found = _NUMBER.match(text or "")
    return (int(found[1]), int(found[2])) if found else (0, 0)


def installed_versions() -> dict[str, str | None]:
    """Version of Python and of each package; None if it is not installed.

    CUDA and NCCL are the packages that pip installed with torch. For a torch build that bundles them, such as conda's,
    both are None.
    """
    return {"python": platform.python_version(), **{name: installed_version(name) for name in _DISTRIBUTIONS}}


def installed_version(name: str) -> str | None:
    """Version of a package of the report, or of any other distribution; None if it is not installed."""
    return next(filter(None, map(_version, _DISTRIBUTIONS.get(name, (name,)))), None)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_tracking(facts: Facts) -> Iterator[Finding]:
    """Check the tracking store and the run; report only the scheme of the store's address."""
    uri, run_id = facts.environ.get("MLFLOW_TRACKING_URI", ""), facts.environ.get("MLFLOW_RUN_ID")
    scheme = uri.partition(":")[0]
    if scheme == "azureml" and not facts.versions["azureml-mlflow"]:
        yield Finding(
            "problem",
            "tracking",
            "MLFLOW_TRACKING_URI begins with azureml:, which MLflow understands only with azureml-mlflow.",
            install_line("azure"),
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
