"""Errors of the strategies. Each is also of the type that Lightning's own strategies raise in the same place."""

from __future__ import annotations

from lightning.fabric.utilities.exceptions import MisconfigurationException


class ConfigurationError(MisconfigurationException, ValueError):
    """Arguments, a configuration or a module do not fit one another or the job."""


class MeshSizeError(ConfigurationError, RuntimeError):
    """The sizes of a device mesh do not fit the job. Lightning raises RuntimeError here."""


class MissingPlanError(ConfigurationError, TypeError):
    """A module does not say how to cut it. Lightning raises TypeError for a module not made for its strategy."""


class UnfitCheckpointError(ConfigurationError, FileNotFoundError):
    """The path holds nothing that the strategy reads. Lightning raises FileNotFoundError (DeepSpeed) or ValueError."""


class NoDeepSpeedError(MisconfigurationException, ModuleNotFoundError):
    """DeepSpeed is not installed."""
