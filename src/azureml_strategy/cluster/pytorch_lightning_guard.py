"""The guard as a callback of `pytorch_lightning`; to be imported where that package is in use."""

from __future__ import annotations

import importlib
from typing import Any

from azureml_strategy.cluster.guard import LaunchGuard

# No dependency of ours: a script that uses it has it.
pytorch_lightning: Any = importlib.import_module("pytorch_lightning")


class PytorchLightningGuard(LaunchGuard, pytorch_lightning.Callback):  # type: ignore[misc]
    """`LaunchGuard` for Trainers of the separate copy of Lightning, which want callbacks of its own class."""
