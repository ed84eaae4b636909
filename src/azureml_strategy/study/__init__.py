"""The scaling study: runs one recipe at several sizes and compares the results in a table and a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.lazy import lazy_attributes
from azureml_strategy.study.options import StudyError, StudyOptions

if TYPE_CHECKING:
    from azureml_strategy.study.run import run_study

__all__ = ["StudyError", "StudyOptions", "run_study"]

__getattr__ = lazy_attributes(__name__, {"run_study": "azureml_strategy.study.run"})
