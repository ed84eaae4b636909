"""Collective operations on a process group: run, checked and timed. The only part of `network` that imports torch."""

from __future__ import annotations

from azureml_strategy.network.collectives.diagnosis import Diagnosis, diagnose
from azureml_strategy.network.collectives.measure import Measurement, Procedure, Unavailable, measure
from azureml_strategy.network.collectives.operations import COLLECTIVES, Collective
from azureml_strategy.network.collectives.pairs import PairBandwidths, measure_pairs
from azureml_strategy.network.collectives.place import Place

__all__ = [
    "COLLECTIVES",
    "Collective",
    "Diagnosis",
    "Measurement",
    "PairBandwidths",
    "Place",
    "Procedure",
    "Unavailable",
    "diagnose",
    "measure",
    "measure_pairs",
]
