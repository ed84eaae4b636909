"""The error of the planner."""

from __future__ import annotations


class PlanError(ValueError):
    """The plan cannot be made as asked; the message says what to type instead."""
