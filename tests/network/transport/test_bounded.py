from __future__ import annotations

from azureml_strategy.network.transport.bounded import LIMIT, count, remember


def test_the_first_value_stays() -> None:
    kept: dict[str, int] = {}
    remember(kept, "a", 1)
    remember(kept, "a", 2)
    assert kept == {"a": 1}


def test_no_more_than_the_limit_is_kept() -> None:
    kept: dict[int, None] = {}
    for key in range(LIMIT + 5):
        remember(kept, key, None)
    assert list(kept) == list(range(LIMIT))


def test_known_keys_are_counted_beyond_the_limit() -> None:
    counts: dict[int, int] = {}
    for key in [*range(LIMIT + 5), 0, LIMIT + 1]:
        count(counts, key, 2)
    assert len(counts) == LIMIT
    assert (counts[0], counts[1]) == (4, 2)
