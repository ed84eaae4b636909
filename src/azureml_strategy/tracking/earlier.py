"""What earlier attempts of a job have logged."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient


class EarlierMetrics:
    """The metrics of a run up to the step that each has when this attempt first writes it.

    Attempts end at any moment, and each metric is written in order: what the store has of one is all up to some step.

    Args:
        client: reads the store, once a metric; used on the writer's thread.
        run_id: the run.
    """

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._last: dict[str, float] = {}

    def __contains__(self, metric: Metric) -> bool:
        if metric.key not in self._last:
            history = self._client.get_metric_history(self._run_id, metric.key)
            self._last[metric.key] = max((each.step for each in history), default=-math.inf)
        return bool(metric.step <= self._last[metric.key])
