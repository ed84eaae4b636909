"""Records some steps of a training by torch.profiler, and says what they spent their time on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:
    from azureml_strategy.profiling.callback import ProfileSteps

__all__ = ["ProfileSteps"]

# Lazy, so that the summary of a trace does not wait for the import of torch and Lightning.
__getattr__ = lazy_attributes(__name__, {"ProfileSteps": "azureml_strategy.profiling.callback"})
