from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.profiling.request import (
    Details,
    ProfileRequest,
    ProfileRequestError,
    check_ranks,
    parse_ranks,
    parse_request,
    parse_steps,
)

DEFAULT = ProfileRequest(5, (0,), Details())


@pytest.mark.parametrize(("text", "steps"), [("20-25", (20, 25)), ("7", (7, 7)), (7, (7, 7)), (" 1 - 2 ", (1, 2))])
def test_steps(text: str | int, steps: tuple[int, int]) -> None:
    assert parse_steps(text) == steps


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("25-20", "write steps=20-25"),
        ("a-b", "no range of steps"),
        ("-3", "no range of steps"),
        ("1-5000", "5000 steps are too many"),
    ],
)
def test_steps_that_are_none(text: str, said: str) -> None:
    with pytest.raises(ProfileRequestError, match=said):
        parse_steps(text)


@pytest.mark.parametrize(
    ("ranks", "numbers"),
    [(3, (3,)), ("0,8", (0, 8)), ("0-2,8", (0, 1, 2, 8)), ([8, 0, 8], (0, 8)), (["0-1", 4], (0, 1, 4))],
)
def test_ranks(ranks: str | int | list[int], numbers: tuple[int, ...]) -> None:
    assert parse_ranks(ranks) == numbers


@pytest.mark.parametrize("ranks", ["", "a", "0,", "3-1", [], [True], -1])
def test_ranks_that_are_none(ranks: str | list[int]) -> None:
    with pytest.raises(ProfileRequestError, match="write their numbers"):
        parse_ranks(ranks)


def test_a_rank_that_the_job_does_not_have() -> None:
    check_ranks((0, 7), 8)
    with pytest.raises(ProfileRequestError, match=r"there is no rank 8, 9\. This run has 8 processes: ranks 0 to 7"):
        check_ranks((0, 8, 9), 8)


def test_a_request() -> None:
    assert parse_request("", DEFAULT) == DEFAULT
    asked = parse_request("# why not\nsteps=3\nranks=0,4 shapes=true", DEFAULT)
    assert asked == ProfileRequest(3, (0, 4), Details(shapes=True))
    profile = asked.after(10, "key")
    assert (profile.first, profile.last, profile.steps) == (12, 14, "steps 12-14")


@pytest.mark.parametrize("text", ["steps", "steps=0", "steps=20-25", "shapes=perhaps", "step=3", 'ranks="0'])
def test_a_request_that_cannot_be_understood(text: str) -> None:
    with pytest.raises(ProfileRequestError, match=r"write|steps is how many"):
        parse_request(text, DEFAULT)


@given(
    st.integers(1, 1000), st.sets(st.integers(0, 4095), min_size=1), st.builds(Details, st.booleans(), st.booleans())
)
def test_a_request_is_read_as_it_was_written(count: int, ranks: set[int], details: Details) -> None:
    request = ProfileRequest(count, tuple(sorted(ranks)), details)
    assert parse_request(request.to_text(), DEFAULT) == request
