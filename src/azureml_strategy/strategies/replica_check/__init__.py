"""Compares what ranks must have alike: parameters, buffers, learning rates, counters of steps."""

from azureml_strategy.strategies.replica_check.callback import ReplicaCheck

__all__ = ["ReplicaCheck"]
