"""What a planner cannot answer, in one sentence."""

from __future__ import annotations


class PlanError(ValueError):
    """A module, a batch or a setting for which nothing can be planned. The message says what to change."""
