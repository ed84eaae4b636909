"""Least squares by Levenberg's and Marquardt's method, for few unknowns whose residuals are dear to compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Residuals = Callable[[Floats], Floats]

_STEP = 1e-3  # of the differences that stand for derivatives
_TOLERANCE = 1e-5  # of the sum of squares, relative
_ROUNDS, _NEAR_ROUNDS = 60, 8


@dataclass(frozen=True, eq=False)
class Solution:
    """What was found.

    Attributes:
        unknowns: shape `(k,)`.
        slope: derivative of each residual by each unknown there, shape `(n, k)`.
    """

    unknowns: Floats
    slope: Floats

    @property
    def deviations(self) -> Floats:
        """Standard deviations of the unknowns, shape `(k,)`, for residuals that are in units of theirs."""
        return np.asarray(np.sqrt(np.diag(np.linalg.inv(self.slope.T @ self.slope))))


def solve(residuals: Residuals, starts: Sequence[Floats], bound: float, good: float) -> Solution:
    """Find the unknowns with the least sum of squared residuals, each between `-bound` and `bound`.

    Args:
        residuals: of unknowns `(k,)`, shape `(n,)`; with at least one that pulls on each unknown, so that the normal
            equations have a solution.
        starts: unknowns from which it searches, one after the other.
        bound: as above.
        good: a sum of squares below which no further start is tried.
    """
    best, least = starts[0], math.inf
    for start in starts:
        end = _descend(residuals, start, bound)
        cost = _cost(residuals(end))
        if cost < least:
            best, least = end, cost
        if least < good:
            break
    return Solution(best, _derivatives(residuals, best, residuals(best)))


def solve_nearby(residuals: Residuals, start: Floats, slope: Floats, bound: float) -> Floats:
    """Find the unknowns of a problem that is nearly one that was solved, whose derivatives stand for its own.

    Args:
        residuals: as in `solve`.
        start: unknowns of the other problem, shape `(k,)`.
        slope: its derivatives there, of these residuals by these unknowns, shape `(n, k)`.
        bound: as in `solve`.

    Returns:
        The unknowns, shape `(k,)`.
    """
    found, now, is_own = start, residuals(start), False
    for _ in range(_NEAR_ROUNDS):
        step = _step(slope, now, found, bound)
        trials = [np.clip(found + part * step, -bound, bound) for part in (1.0, 0.5, 0.1)]
        better = next(((trial, there) for trial in trials if _cost(there := residuals(trial)) < _cost(now)), None)
        if better is None and is_own:
            break
        if better is None:  # the derivatives of the other problem do not lead on
            slope, is_own = _derivatives(residuals, found, now), True
            continue
        gain = _cost(now) - _cost(better[1])
        found, now = better
        if gain <= _TOLERANCE * _cost(now):
            break
    return found


def _step(slope: Floats, now: Floats, found: Floats, bound: float, damping: float = 0.0) -> Floats:
    """The step to the least squares if the residuals were linear; unknowns that it would push over a bound stay."""
    squares, gradient = slope.T @ slope, slope.T @ now
    normal = squares + damping * np.diag(np.diag(squares))
    step = np.asarray(np.linalg.solve(normal, -gradient), np.float64)
    free = (np.abs(found) < bound) | (np.sign(step) != np.sign(found))
    if not free.all():
        step = np.zeros_like(step)
        step[free] = np.linalg.solve(normal[np.ix_(free, free)], -gradient[free])
    return step


def _descend(residuals: Residuals, start: Floats, bound: float) -> Floats:
    """Go down from a start, by Newton's step where the residuals are nearly linear and by a shorter one elsewhere."""
    found, damping = start, 1e-3
    now = residuals(found)
    slope = _derivatives(residuals, found, now)
    for _ in range(_ROUNDS):
        trial = np.clip(found + _step(slope, now, found, bound, damping), -bound, bound)
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


def _derivatives(residuals: Residuals, at: Floats, there: Floats) -> Floats:
    """Of each residual by each unknown, shape `(n, k)`."""
    columns = [(residuals(at + _STEP * unit) - there) / _STEP for unit in np.eye(len(at))]
    return np.stack(columns, axis=1)
