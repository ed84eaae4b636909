"""What NCCL really uses between nodes, read from its own log."""

from __future__ import annotations

from azureml_strategy.network.transport.describe import describe
from azureml_strategy.network.transport.errors import LogError
from azureml_strategy.network.transport.networks import Kind
from azureml_strategy.network.transport.reader import read_transport
from azureml_strategy.network.transport.result import Transport

__all__ = ["Kind", "LogError", "Transport", "describe", "read_transport"]
