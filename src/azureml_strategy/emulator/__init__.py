"""Runs a command on this machine as an Azure ML job of several nodes would: same variables, same run, same end."""

from __future__ import annotations

from azureml_strategy.emulator.gpus import enough_gpus
from azureml_strategy.emulator.job import Emulated, EmulatedJob, Preemption, emulate, emulate_run
from azureml_strategy.emulator.nodes import EmulationError
from azureml_strategy.emulator.processes import error_sentence

__all__ = [
    "Emulated",
    "EmulatedJob",
    "EmulationError",
    "Preemption",
    "emulate",
    "emulate_run",
    "enough_gpus",
    "error_sentence",
]
