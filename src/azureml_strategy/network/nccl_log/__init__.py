"""Reads from NCCL's log what NCCL really uses between nodes."""

from __future__ import annotations

from azureml_strategy.network.nccl_log.devices import Kind
from azureml_strategy.network.nccl_log.failures import LogError
from azureml_strategy.network.nccl_log.reader import read_transport
from azureml_strategy.network.nccl_log.transport import Transport, describe, without_network

__all__ = ["Kind", "LogError", "Transport", "describe", "read_transport", "without_network"]
