"""Whether metrics reach the job's MLflow run."""

from __future__ import annotations

from collections.abc import Iterator

from azureml_strategy.network.doctor.facts import Facts
from azureml_strategy.network.findings import Finding


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
