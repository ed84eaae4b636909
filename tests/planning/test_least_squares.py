"""The fit of few unknowns: beside a line's closed form, from several starts, and from one that was solved before."""

from __future__ import annotations

import math

import numpy as np
import pytest

from azureml_strategy.planning.least_squares import Floats, solve, solve_from

TIMES = np.linspace(0, 3, 12)


def residuals(given: Floats) -> Floats:
    """A decay to a floor, measured with noise, and a weak pull to zero."""
    measured = 2.0 * np.exp(-1.3 * TIMES) + 0.4 + 0.01 * np.sin(40 * TIMES)
    amount, rate, floor = given
    return np.array([*((amount * np.exp(-rate * TIMES) + floor - measured) / 0.01), *(given / 10)])


def test_a_line_has_its_closed_form() -> None:
    """Slope and intercept with their deviations, as every book of statistics has them."""
    measured, noise = 3 * TIMES - 1 + 0.1 * np.cos(7 * TIMES), 0.1
    slope = np.cov(TIMES, measured, ddof=0)[0, 1] / TIMES.var()
    found = solve(lambda line: (line[0] * TIMES + line[1] - measured) / noise, [np.zeros(2)], bound=10.0, good=0.0)
    assert found.unknowns == pytest.approx([slope, measured.mean() - slope * TIMES.mean()], abs=1e-5)
    spread = math.sqrt(len(TIMES) * TIMES.var())
    assert found.deviations[0] == pytest.approx(noise / spread, rel=1e-4)


def test_a_bound_is_kept() -> None:
    found = solve(residuals, [np.zeros(3)], bound=1.0, good=0.0)
    assert abs(found.unknowns).max() == pytest.approx(1.0, abs=1e-3)
    assert found.cost == pytest.approx(float(residuals(found.unknowns) @ residuals(found.unknowns)))


def test_the_best_of_several_starts_counts_until_one_is_good() -> None:
    tried: list[float] = []

    def two_valleys(given: Floats) -> Floats:
        tried.append(float(given[0]))
        return np.array([(given[0] ** 2 - 1) * 10, (given[0] - 1) * 3])

    starts = [np.array([-1.5]), np.array([1.5])]
    assert solve(two_valleys, starts, bound=3.0, good=0.0).unknowns[0] == pytest.approx(1, abs=1e-4)
    tried.clear()
    assert solve(two_valleys, starts, bound=3.0, good=math.inf).unknowns[0] < 0
    assert max(tried) < 0


def test_a_problem_like_one_that_was_solved_begins_with_its_derivatives() -> None:
    whole = solve(residuals, [np.zeros(3)], bound=5.0, good=0.0)
    rows = [row for row in range(len(whole.slope)) if row != 4]
    calls = {"near": 0, "afresh": 0}

    def counted(name: str) -> Floats:
        def some(given: Floats) -> Floats:
            calls[name] += 1
            return residuals(given)[rows]

        return some  # type: ignore[return-value]

    near = solve_from(counted("near"), whole.unknowns, 5.0, whole.slope[rows])  # type: ignore[arg-type]
    afresh = solve_from(counted("afresh"), np.zeros(3), 5.0)  # type: ignore[arg-type]
    assert near.unknowns == pytest.approx(afresh.unknowns, rel=1e-3)
    assert near.unknowns != pytest.approx(whole.unknowns, rel=1e-4)
    assert calls["near"] < calls["afresh"] / 2
