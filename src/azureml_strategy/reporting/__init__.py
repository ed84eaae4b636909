"""Shows a run on one page that says what it waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:
    from azureml_strategy.tracking.run_page import RunPage

__all__ = ["RunPage"]

__getattr__ = lazy_attributes(__name__, {"RunPage": "azureml_strategy.tracking.run_page"})
