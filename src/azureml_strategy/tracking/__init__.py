"""What a run measures of itself and where it records it."""

from __future__ import annotations

from azureml_strategy.tracking.location import RunLocation
from azureml_strategy.tracking.logger import JobMLFlowLogger
from azureml_strategy.tracking.progress import ThroughputProgressBar
from azureml_strategy.tracking.report import RunReport
from azureml_strategy.tracking.run import TrackingError
from azureml_strategy.tracking.summary import ThroughputSummary
from azureml_strategy.tracking.throughput import ThroughputCallback

__all__ = [
    "JobMLFlowLogger",
    "RunLocation",
    "RunReport",
    "ThroughputCallback",
    "ThroughputProgressBar",
    "ThroughputSummary",
    "TrackingError",
]
