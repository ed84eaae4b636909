"""Least squares by Levenberg's and Marquardt's method, for few unknowns whose residuals are dear to compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_STEP = 1e-3  # of the differences that stand for derivatives
_TOLERANCE = 1e-8  # of the sum of squares, relative
_ROUNDS = 60


def solve(residuals: Callable[[Floats], Floats], starts: Sequence[Floats], bound: float) -> tuple[Floats, Floats]:
    """Find the unknowns with the least sum of squared residuals, each between `-bound` and `bound`.

    Args:
        residuals: of unknowns `(k,)`, shape `(n,)`; with at least one that pulls on each unknown, so that the normal
            equations have a solution.
        starts: unknowns from which it searches; the best end counts.
        bound: as above.

    Returns:
        The unknowns `(k,)`, and their standard deviations `(k,)` for residuals that are in units of theirs.
    """
    ends = [_descend(residuals, start, bound) for start in starts]
    found = min(ends, key=lambda end: _cost(residuals(end)))
    slope = _derivatives(residuals, found, residuals(found))
    return found, np.sqrt(np.diag(np.linalg.inv(slope.T @ slope)))


def _descend(residuals: Callable[[Floats], Floats], start: Floats, bound: float) -> Floats:
    """Go down from a start, by Newton's step where the residuals are nearly linear and by a shorter one elsewhere."""
    found, damping = start, 1e-3
    now = residuals(found)
    slope = _derivatives(residuals, found, now)
    for _ in range(_ROUNDS):
        normal = slope.T @ slope
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slope.T @ now)
        trial = np.clip(found + step, -bound, bound)
        there = residuals(trial)
        gain = _cost(now) - _cost(there)
        if gain <= 0:
            damping *= 10
        else:
            damping /= 10
            found, now = trial, there
            slope = _derivatives(residuals, found, now)
        if abs(gain) <= _TOLERANCE * _cost(now) or damping > 1e8:
            break
    return found


def _cost(residuals: Floats) -> float:
    return float(residuals @ residuals)


def _derivatives(residuals: Callable[[Floats], Floats], at: Floats, there: Floats) -> Floats:
    """Of each residual by each unknown, shape `(n, k)`."""
    columns = [(residuals(at + _STEP * unit) - there) / _STEP for unit in np.eye(len(at))]
    return np.stack(columns, axis=1)
