"""Least squares by scipy, for few unknowns within bounds whose residuals are dear to compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Residuals = Callable[[Floats], Floats]

_STEP = 1e-3  # of the differences that stand for derivatives: far above the rounding of a simulated step
_TOLERANCE = 1e-5  # of the sum of squares, relative


@dataclass(frozen=True, eq=False)
class Solution:
    """What was found.

    Attributes:
        unknowns: shape `(k,)`.
        slope: derivative of each residual by each unknown there, shape `(n, k)`.
        cost: the sum of squares.
    """

    unknowns: Floats
    slope: Floats
    cost: float

    @property
    def deviations(self) -> Floats:
        """Standard deviations of the unknowns, shape `(k,)`, for residuals that are in units of theirs."""
        return np.asarray(np.sqrt(np.diag(np.linalg.inv(self.slope.T @ self.slope))))


def solve(residuals: Residuals, starts: Sequence[Floats], bound: float, good: float) -> Solution:
    """Find the unknowns with the least sum of squared residuals, each between `-bound` and `bound`.

    Args:
        residuals: of unknowns `(k,)`, shape `(n,)`; with at least one that pulls on each unknown, so that the
            deviations exist.
        starts: unknowns from which it searches, one after the other.
        bound: as above.
        good: a sum of squares below which no further start is tried.
    """
    found: list[Solution] = []
    for start in starts:
        found.append(solve_from(residuals, start, bound))
        if found[-1].cost < good:
            break
    return min(found, key=lambda each: each.cost)


def solve_from(residuals: Residuals, start: Floats, bound: float, slope: Floats | None = None) -> Solution:
    """Find the unknowns from one start.

    Args:
        residuals: as in `solve`.
        start: unknowns, shape `(k,)`.
        bound: as in `solve`.
        slope: the derivatives at the start, if they are known, shape `(n, k)`.
    """
    from scipy.optimize import least_squares

    def derivatives(at: Floats) -> Floats:
        if slope is not None and np.array_equal(at, start):
            return slope
        there = residuals(at)
        return np.stack([(residuals(at + _STEP * unit) - there) / _STEP for unit in np.eye(len(at))], axis=1)

    found = least_squares(residuals, start, derivatives, bounds=(-bound, bound), ftol=_TOLERANCE)
    return Solution(found.x, found.jac, 2 * float(found.cost))
