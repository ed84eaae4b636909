"""Properties of the learning-rate schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.models import scaled_learning_rate, warmup_cosine

_STEPS = st.integers(0, 5000)


@given(_STEPS, st.integers(0, 1000), st.integers(1, 4000))
def test_it_stays_between_zero_and_one(step: int, warmup: int, total: int) -> None:
    assert 0.0 <= warmup_cosine(step, warmup, total) <= 1.0


@given(st.integers(0, 500), st.integers(1, 500))
def test_it_rises_to_the_peak_then_falls_to_zero(warmup: int, decay: int) -> None:
    factors = [warmup_cosine(step, warmup, warmup + decay) for step in range(warmup + decay + 1)]
    assert factors[: warmup + 1] == sorted(factors[: warmup + 1])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert factors[warmup] == 1.0
    assert factors[-1] == 0.0
    assert all(factor > 0 for factor in factors[:-1])  # no step is wasted


@given(st.integers(1, 500), st.integers(0, 499))
def test_the_warmup_is_linear(warmup: int, step: int) -> None:
    step %= warmup
    assert warmup_cosine(step, warmup, 10 * warmup) == pytest.approx((step + 1) / warmup)


def test_the_decay_is_half_way_down_half_way_through() -> None:
    assert warmup_cosine(60, 20, 100) == pytest.approx(0.5)
    assert warmup_cosine(40, 20, 100) == pytest.approx(0.5 + 0.5**0.5 / 2)


def test_a_run_shorter_than_its_warmup_never_reaches_the_peak() -> None:
    assert [warmup_cosine(step, 10, 3) for step in range(4)] == [0.1, 0.2, 0.3, 0.0]


@given(st.floats(1e-4, 10.0), st.integers(1, 65536))
def test_the_scaling_is_linear(learning_rate: float, batch: int) -> None:
    assert scaled_learning_rate(learning_rate, 256) == pytest.approx(learning_rate)
    assert scaled_learning_rate(learning_rate, 2 * batch) == pytest.approx(
        2 * scaled_learning_rate(learning_rate, batch)
    )
