"""Wishes that cannot be granted are refused with a word, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from azureml_strategy.benching import BenchError, BenchOptions


def test_nothing_has_to_be_said() -> None:
    assert BenchOptions().collectives is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"collectives": ["allreduce"]}, "there is no 'allreduce'. Use all-reduce, all-gather, reduce-scatter"),
        ({"collectives": [""]}, "there is no ''"),
        ({"dtype": "float64"}, "Use float32, bfloat16, float16"),
        ({"backend": "mpi"}, "Use nccl, gloo"),
        ({"iterations": 0}, "--iterations 0 is too few: give 1 or more"),
        ({"warmup": -1}, "--warmup -1 is too few: give 0 or more"),
        ({"timeout_s": 0}, "--timeout 0 cannot be"),
        ({"timeout_s": float("nan")}, "--timeout nan cannot be"),
        ({"expect": -1.0}, "--expect -1 cannot be"),
        ({"expect": float("inf")}, "--expect inf cannot be"),
        ({"pairs": True, "collectives": ["all-reduce"]}, "Leave --collectives out, or --pairs"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BenchError) as caught:
        BenchOptions(**options)
    assert words in str(caught.value)
