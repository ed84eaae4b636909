"""Measures a run (throughput, cost, network) and records it in MLflow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:
    from azureml_strategy.tracking.cost import CostTracker
    from azureml_strategy.tracking.counters import NodeCounters
    from azureml_strategy.tracking.logger import JobMLFlowLogger
    from azureml_strategy.tracking.progress import ThroughputProgressBar
    from azureml_strategy.tracking.report import RunReport
    from azureml_strategy.tracking.run import RunLocation
    from azureml_strategy.tracking.run_page import RunPage
    from azureml_strategy.tracking.store import TrackingError
    from azureml_strategy.tracking.timing.loader_headroom import DataHeadSpace
    from azureml_strategy.tracking.timing.summary import ThroughputSummary
    from azureml_strategy.tracking.timing.throughput import ThroughputCallback
    from azureml_strategy.tracking.wandb import JobWandbLogger

__all__ = [
    "CostTracker",
    "DataHeadSpace",
    "JobMLFlowLogger",
    "JobWandbLogger",
    "NodeCounters",
    "RunLocation",
    "RunPage",
    "RunReport",
    "ThroughputCallback",
    "ThroughputProgressBar",
    "ThroughputSummary",
    "TrackingError",
]

# Lazy, so that code which only needs `RunLocation` does not wait for the import of Lightning.
__getattr__ = lazy_attributes(
    __name__,
    {
        "CostTracker": "azureml_strategy.tracking.cost",
        "DataHeadSpace": "azureml_strategy.tracking.timing.loader_headroom",
        "NodeCounters": "azureml_strategy.tracking.counters",
        "RunLocation": "azureml_strategy.tracking.run",
        "RunPage": "azureml_strategy.tracking.run_page",
        "JobMLFlowLogger": "azureml_strategy.tracking.logger",
        "JobWandbLogger": "azureml_strategy.tracking.wandb",
        "ThroughputProgressBar": "azureml_strategy.tracking.progress",
        "RunReport": "azureml_strategy.tracking.report",
        "TrackingError": "azureml_strategy.tracking.store",
        "ThroughputSummary": "azureml_strategy.tracking.timing.summary",
        "ThroughputCallback": "azureml_strategy.tracking.timing.throughput",
    },
)
