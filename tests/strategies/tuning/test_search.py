"""The search against cost models whose fastest settings are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.strategies.compression import Compression
from azureml_strategy.strategies.tuning.search import (
    COMPRESSIONS,
    Request,
    Search,
    Settings,
    bucket_sizes,
    first_buckets,
    sizes_first_bucket,
)

MIB = 2**20
SIZES = st.sampled_from([None, 5, 25, 98])


class Model:
    """Seconds of a step as a product of what each property costs, with noise.

    Args:
        costs: of compressions and bucket sizes; 1 where it says nothing.
        noise: greatest relative error of a step.
    """

    def __init__(self, costs: dict[object, float], noise: float = 0.0, seed: int = 0) -> None:
        self.costs = costs
        self.noise = noise
        self.random = random.Random(seed)
        self.passes = 0

    def true_s(self, settings: Settings) -> float:
        cost = self.costs.get(settings.gradient_compression or "plain", 1.0)
        cost *= self.costs.get(("bucket", settings.bucket_cap_mb), 1.0)
        cost *= self.costs.get("static", 1.0) if settings.static_graph else 1.0
        cost *= self.costs.get("copied", 1.0) if not settings.gradient_as_bucket_view else 1.0
        return cost * self.costs.get(("first", settings.first_bucket_mb), 1.0)

    def __call__(self, settings: Settings, steps: int) -> Sequence[float]:
        self.passes += 2 + steps
        return [self.true_s(settings) * (1 + self.random.uniform(-self.noise, self.noise)) for _ in range(steps)]


def search(model: Callable[[Settings, int], Sequence[float]], request: Request, floor_s: float = 0.0) -> Search:
    return Search(model, request, gradient_bytes=98 * MIB, floor_s=floor_s)


@given(
    st.permutations([0.5, 0.7, 0.9, 1.0]),
    st.permutations([0.6, 0.8, 1.0, 1.2]),
    st.sampled_from([0.7, 1.0, 1.3]),
    SIZES,
    st.sets(st.sampled_from(COMPRESSIONS)),
)
def test_the_fastest_of_separate_costs_is_found(
    compression: list[float], bucket: list[float], static: float, given_mb: int | None, allowed: set[Compression]
) -> None:
    costs: dict[object, float] = dict(zip(["plain", *COMPRESSIONS], compression, strict=True))
    costs |= {("bucket", size): cost for size, cost in zip([None, 5, 25, 98], bucket, strict=True)}
    model = Model({**costs, "static": static, "copied": 1.1, ("first", 1): 1.05})
    default = Settings(bucket_cap_mb=given_mb)
    request = Request(default, tuple(allowed), static_graph=True)
    pick = search(model, request).run()
    names: list[Compression | None] = [None, *allowed]
    reachable = [
        Settings(size, None, graph, True, each)
        for size in (None, 5, 25, 98)
        for graph in (False, True)
        for each in names
    ]
    best = min(map(model.true_s, reachable))
    assert model.true_s(pick) <= best * 1.02 + 1e-9
    assert pick.gradient_compression in names
    assert model.passes < 150


@given(st.integers(0, 10_000))
def test_equal_settings_leave_the_default(seed: int) -> None:
    """With noise the search finds a favourite, but it must not win by chance alone more often than in 1 of 20 cases."""
    picked = 0
    for each in range(20):
        model = Model({}, noise=0.2, seed=seed * 20 + each)
        picked += search(model, Request(Settings(), COMPRESSIONS, static_graph=True)).run() != Settings()
    assert picked <= 8  # of 20, each with a chance of 0.05: more than 8 comes once in 10^6


@given(SIZES, st.sets(st.sampled_from(COMPRESSIONS)), st.booleans(), st.integers(0, 100))
def test_each_trial_has_a_line_and_their_number_is_told_before(
    given_mb: int | None, allowed: set[Compression], static: bool, seed: int
) -> None:
    lines: list[str] = []
    model = Model({}, noise=0.2, seed=seed)
    request = Request(Settings(bucket_cap_mb=given_mb), tuple(allowed), static_graph=static)
    found = Search(model, request, gradient_bytes=98 * MIB, floor_s=0.5, tell=lines.append)
    found.run()
    first, *trials = lines
    most = int(first.split()[2])
    pairs = 2 * len(found.trials.pairs)
    assert model.passes == 4 * len(trials)
    assert most - 6 <= len(trials) - pairs <= most
    assert f"{2 * most} s at least" in first
    assert all(" ms a step" in each for each in trials)


def test_a_clear_gain_is_picked_in_spite_of_noise() -> None:
    for seed in range(50):
        model = Model({"bf16": 0.6}, noise=0.1, seed=seed)
        found = search(model, Request(Settings(), ("bf16",)))
        assert found.run().gradient_compression == "bf16"
        assert "pairs with the default" in found.why


def test_nothing_lossy_is_measured_unless_it_is_allowed() -> None:
    found = search(Model({"bf16": 0.1, "static": 0.1}), Request(Settings()))
    assert found.run() == Settings()
    assert all(each.gradient_compression is None and not each.static_graph for each in found.trials.seconds)


def test_a_gain_that_nobody_sees_is_not_picked() -> None:
    found = search(Model({("bucket", 98): 0.99}), Request(Settings()))
    assert found.run() == Settings()
    assert found.why == "buckets of 98 MiB saves 1.0%, less than 2%"


def test_where_nothing_is_waited_for_nothing_is_searched() -> None:
    model = Model({("bucket", 98): 0.5})
    found = search(model, Request(Settings()), floor_s=0.99)
    assert found.run() == Settings()
    assert model.passes == 4
    assert "hardly any communication" in found.why


def test_where_a_busy_machine_made_all_steps_alone_slow_they_are_looked_at_again() -> None:
    model, looks = Model({("bucket", 98): 0.5}), []
    found = Search(model, Request(Settings()), 98 * MIB, floor_s=1.3, look_again=lambda: looks.append(1) or 0.3)
    assert found.run().bucket_cap_mb == 98
    assert looks == [1]


def test_what_a_user_has_switched_off_stays_off() -> None:
    """Gradients are not made views of the buckets for a user who had them copied."""
    found = search(Model({}), Request(Settings(gradient_as_bucket_view=False)))
    found.run()
    assert not any(each.gradient_as_bucket_view for each in found.trials.seconds)


@given(SIZES, st.integers(1, 300 * MIB))
def test_bucket_sizes_are_no_larger_than_the_gradients(size: int | None, gradient_bytes: int) -> None:
    base = Settings(bucket_cap_mb=size)
    found = bucket_sizes(base, gradient_bytes)
    assert base not in found
    assert len({each.bucket_cap_mb for each in found}) == len(found)
    whole = -(-gradient_bytes // MIB)
    assert all(each.bucket_cap_mb is None or 1 <= each.bucket_cap_mb <= max(1, whole) for each in found)


def test_a_small_first_bucket_is_tried_beside_large_ones_only() -> None:
    assert first_buckets(Settings()) == [], "torch's default has one"
    assert first_buckets(Settings(bucket_cap_mb=1)) == []
    large = Settings(bucket_cap_mb=25)
    smaller = replace(large, first_bucket_mb=1)
    assert first_buckets(large) == ([smaller] if sizes_first_bucket() else []), "this torch may not take one"
    assert first_buckets(smaller) == ([large] if sizes_first_bucket() else [])
