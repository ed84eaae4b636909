"""The fit of few unknowns, beside scipy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import least_squares

from azureml_strategy.planning.least_squares import Floats, solve, solve_nearby

TIMES = np.linspace(0, 3, 12)


def residuals(given: Floats) -> Floats:
    """A decay to a floor, measured with noise, and a weak pull to zero."""
    measured = 2.0 * np.exp(-1.3 * TIMES) + 0.4 + 0.01 * np.sin(40 * TIMES)
    amount, rate, floor = given
    return np.array([*((amount * np.exp(-rate * TIMES) + floor - measured) / 0.01), *(given / 10)])


def test_it_finds_what_scipy_finds() -> None:
    expected = least_squares(residuals, np.zeros(3) + 0.5)
    found = solve(residuals, [np.zeros(3)], bound=5.0, good=0.0)
    assert found.unknowns == pytest.approx(expected.x, rel=1e-3)
    covariance = np.linalg.inv(expected.jac.T @ expected.jac)
    assert found.deviations == pytest.approx(np.sqrt(np.diag(covariance)), rel=0.02)


def test_a_bound_is_kept() -> None:
    found = solve(residuals, [np.zeros(3)], bound=1.0, good=0.0)
    assert abs(found.unknowns).max() == 1.0
    within = least_squares(residuals, np.zeros(3) + 0.5, bounds=(-1, 1))
    assert float(residuals(found.unknowns) @ residuals(found.unknowns)) < 1.1 * 2 * within.cost


def test_the_best_of_several_starts_counts_until_one_is_good() -> None:
    tried: list[float] = []

    def two_valleys(given: Floats) -> Floats:
        tried.append(float(given[0]))
        return np.array([(given[0] ** 2 - 1) * 10, (given[0] - 1) * 3])

    starts = [np.array([-1.5]), np.array([1.5])]
    assert solve(two_valleys, starts, bound=3.0, good=0.0).unknowns[0] == pytest.approx(1)
    tried.clear()
    assert solve(two_valleys, starts, bound=3.0, good=math.inf).unknowns[0] < 0
    assert max(tried) < 0


def test_a_problem_like_one_that_was_solved() -> None:
    whole = solve(residuals, [np.zeros(3)], bound=5.0, good=0.0)
    rows = [row for row in range(len(whole.slope)) if row != 4]
    near = solve_nearby(lambda given: residuals(given)[rows], whole.unknowns, whole.slope[rows], bound=5.0)
    expected = least_squares(lambda given: residuals(given)[rows], np.zeros(3) + 0.5).x
    assert near == pytest.approx(expected, rel=1e-3)
    assert near != pytest.approx(whole.unknowns, rel=1e-4)
