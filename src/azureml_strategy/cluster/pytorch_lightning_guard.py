"""`LaunchGuard` as a callback of `pytorch_lightning`. Import this module only where that package is in use."""

from __future__ import annotations

import importlib
from typing import Any

from azureml_strategy.cluster.guard import LaunchGuard

# We do not depend on it: a script that uses it has it installed.
pytorch_lightning: Any = importlib.import_module("pytorch_lightning")


class PytorchLightningGuard(LaunchGuard, pytorch_lightning.Callback):  # type: ignore[misc]
    """`LaunchGuard` for Trainers of the separate `pytorch_lightning` copy, which require its own `Callback` class."""
