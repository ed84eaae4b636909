"""What the strategies raise: of the kind that Lightning's own raise in the same place as well."""

from __future__ import annotations

from lightning.fabric.utilities.exceptions import MisconfigurationException


class ConfigurationError(MisconfigurationException, ValueError):
    """Arguments, a configuration or a module that do not fit one another or the job."""


class MeshSizeError(ConfigurationError, RuntimeError):
    """Sizes of a device mesh that do not fit the job; Lightning's is a RuntimeError."""


class MissingPlanError(ConfigurationError, TypeError):
    """A module that does not say how to cut it; Lightning's is a TypeError for one not made for its strategy."""


class UnfitCheckpointError(ConfigurationError, FileNotFoundError):
    """Nothing at a path that the strategy reads; Lightning's DeepSpeed raises FileNotFoundError, others ValueError."""


class NoDeepSpeedError(MisconfigurationException, ModuleNotFoundError):
    """DeepSpeed is not installed."""
