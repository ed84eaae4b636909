from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.bench import BenchError, BenchOptions, parse_sizes
from azureml_strategy.bench.options import format_size


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("64MB", (64_000_000,)),
        ("64MiB", (1 << 26,)),
        ("8gib", (1 << 33,)),
        ("1.5 kb", (1500,)),
        ("100", (100,)),
        ("100B", (100,)),
        ("2TB,1TiB", (1 << 40, 2 * 10**12)),
        ("4MB,1MB,1000KB", (1_000_000, 4_000_000)),
        ("1MB-8MB", (1_000_000, 2_000_000, 4_000_000, 8_000_000)),
        ("1MB-7MB", (1_000_000, 2_000_000, 4_000_000, 7_000_000)),
        ("1MB-1MB", (1_000_000,)),
        ("1KB - 2KB, 1MiB", (1000, 2000, 1 << 20)),
    ],
)
def test_what_is_read(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    "text", ["8G", "64M", "", "1MB,", "big", "-1MB", "1MB-", "1e6", "0x10", "1..2MB", "1 M B", "٣MB"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(BenchError, match=r"is no message size\. Write 64MB \(10\^6 bytes each\) or 64MiB"):
        parse_sizes(text)


@pytest.mark.parametrize("text", ["0", "0MB", "0.1B"])
def test_nothing_is_no_message(text: str) -> None:
    with pytest.raises(BenchError, match="it has no byte"):
        parse_sizes(text)


def test_a_range_upside_down() -> None:
    with pytest.raises(BenchError, match=r"not from 8 MB to 1 MiB\. Write 1 MiB-8 MB\."):
        parse_sizes("8MB-1MiB")


@given(st.integers(1, 10**12), st.integers(1, 10**12))
def test_ranges(one: int, other: int) -> None:
    first, last = sorted((one, other))
    sizes = parse_sizes(f"{first}-{last}")
    assert (sizes[0], sizes[-1]) == (first, last)
    assert all(larger == 2 * size for size, larger in pairwise(sizes[:-1]))
    assert all(size < larger <= 2 * size for size, larger in pairwise(sizes))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1, "1 B"),
        (996, "996 B"),
        (1000, "1 KB"),
        (1024, "1 KiB"),
        (1 << 20, "1 MiB"),
        (64_000_000, "64 MB"),
        (8 << 30, "8 GiB"),
        (10**13, "10 TB"),
        (1500, "1.5 KB"),
        (3 << 19, "1.573 MB"),
    ],
)
def test_how_it_is_written(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(1, 10**15))
def test_what_is_written_can_be_read(size: int) -> None:
    assert parse_sizes(format_size(size))[0] == pytest.approx(size, rel=1e-3)


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
