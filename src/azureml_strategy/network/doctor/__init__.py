"""Reports what this package can tell about a machine, a job or an NCCL log, with a verdict for each check."""

from __future__ import annotations

from azureml_strategy.network.doctor.log import UnreadableLog, explain_log
from azureml_strategy.network.doctor.report import Report, Section, examine, render

__all__ = ["Report", "Section", "UnreadableLog", "examine", "explain_log", "render"]
