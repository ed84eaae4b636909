"""The results in the job's MLflow run."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from azureml_strategy.benching.results import Pairs, Results
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.tracking.batch import Metrics, Record, Tags, make_batches
from azureml_strategy.tracking.run import join_run, resolve_tracking_uri

_FOLDER = "bench"


def log_results(results: Results, files: Sequence[Path]) -> None:
    """Log into the run that MLFLOW_RUN_ID names; without one, nothing is logged. The run stays open.

    A collective's metrics have the message size in bytes as their step, `bench/all-reduce/bus_bandwidth_GBps` and so
    on. A store that does not take them costs a warning.

    Args:
        results: what was measured.
        files: artifacts of the run.
    """
    run_id = os.environ.get("MLFLOW_RUN_ID")
    if not run_id:
        return
    try:
        run = join_run(resolve_tracking_uri(None), run_id)
        for batch in make_batches(_records(results)):
            arguments: dict[str, Any] = {batch.kind: batch.items}
            run.client.log_batch(run_id, **arguments)
        for path in files:
            run.client.log_artifact(run_id, str(path), _FOLDER)
    except Exception as error:  # whatever a store raises: the figures are printed and in a file already
        text = redact_text(f"{type(error).__name__}: {error}")
        warnings.warn(f"The results were not all logged into run {run_id}: {text}", stacklevel=2)


def _records(results: Results) -> Iterator[Record]:
    now = int(1000 * time.time())
    if isinstance(results.measured, Pairs):
        pairs = results.measured
        for (first, second), bandwidth in pairs.bandwidths.bus_bandwidth.items():
            values = {f"{_FOLDER}/pairs/{first}-{second}/bus_bandwidth_GBps": bandwidth}
            yield Metrics(values, pairs.size, now)
    else:
        for each in results.measured.measurements:
            prefix = f"{_FOLDER}/{each.collective}"
            values = {
                f"{prefix}/bus_bandwidth_GBps": each.bus_bandwidth,
                f"{prefix}/algorithm_bandwidth_GBps": each.algorithm_bandwidth,
                f"{prefix}/median_s": each.median_s,
                f"{prefix}/wrong_elements": each.wrong,
            }
            yield Metrics(values, each.size, now)
    if results.verdict:
        yield Tags({f"{_FOLDER}.verdict": results.verdict.word, **results.network.tags})
