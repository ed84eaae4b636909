"""Plans a run before it is rented: what it takes, holds and costs on any Azure size."""

from azureml_strategy.planning.calibration import Calibration, Observed, calibrate
from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.networks import Network, named_network, network_of_counts, network_of_module
from azureml_strategy.planning.predict import MeasuredStep, Prediction, predict
from azureml_strategy.planning.steps import Distribution

__all__ = [
    "Calibration",
    "Distribution",
    "MeasuredStep",
    "Network",
    "Observed",
    "PlanError",
    "Prediction",
    "calibrate",
    "named_network",
    "network_of_counts",
    "network_of_module",
    "predict",
]
