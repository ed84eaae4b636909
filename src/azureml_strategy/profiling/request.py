"""Which steps of which ranks to profile, and how: from a recipe, a script, or a request to a running job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

# Files in the run's folder: a request, its name once rank 0 has taken it, and the answer.
REQUEST, TAKEN, ANSWER = "profile.request", "profile.taken", "profile.answer"
_STEPS = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")
# A trace of more steps fills a disk, and nobody can read it.
_MOST_STEPS = 1000
_LARGEST_RANK = 2**20
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class ProfileRequestError(ValueError):
    """A request cannot be understood or granted; the message says what to write instead."""


@dataclass(frozen=True)
class Details:
    """What torch.profiler records besides operators: the shapes of their inputs, Python's stacks, allocated memory."""

    shapes: bool = False
    stacks: bool = False
    memory: bool = False


@dataclass(frozen=True)
class Profile:
    """A profile of the steps `first` to `last`, as metrics count them, on some ranks.

    The key identifies the request. It is empty for a profile that nobody requested while the job ran.
    """

    first: int
    last: int
    ranks: tuple[int, ...]
    details: Details
    key: str = ""

    @property
    def steps(self) -> str:
        """The steps in words, such as `steps 20-25`."""
        return f"step {self.first}" if self.first == self.last else f"steps {self.first}-{self.last}"


@dataclass(frozen=True)
class ProfileRequest:
    """A request to a running job for a profile of so many steps on some ranks."""

    count: int
    ranks: tuple[int, ...]
    details: Details

    def after(self, step: int, key: str) -> Profile:
        """The profile of a request that all ranks have agreed on after a step. The next step warms the profiler up."""
        return Profile(step + 2, step + 1 + self.count, self.ranks, self.details, key)

    def to_text(self) -> str:
        """The request as `parse_request` reads it."""
        ranks = ",".join(map(str, self.ranks))
        details = " ".join(f"{each.name}={str(getattr(self.details, each.name)).lower()}" for each in fields(Details))
        return f"steps={self.count} ranks={ranks} {details}"


def parse_steps(steps: str | int) -> tuple[int, int]:
    """Read `20-25`, or `20` for one step; return the first and the last.

    Raises:
        ProfileRequestError: it is neither.
    """
    found = _STEPS.fullmatch(str(steps))
    if found is None:
        raise ProfileRequestError(f"steps={steps} is no range of steps: write the first and the last, as steps=20-25.")
    first = int(found[1])
    last = int(found[2]) if found[2] else first
    if last < first:
        raise ProfileRequestError(f"steps={steps} ends before it begins: write steps={last}-{first}.")
    _check_count(last - first + 1)
    return first, last


def parse_ranks(ranks: str | int | Iterable[int]) -> tuple[int, ...]:
    """Read `0`, `0,8` or `0-3,8`, or a list of numbers.

    Raises:
        ProfileRequestError: it is none of these.
    """
    parts = ranks.split(",") if isinstance(ranks, str) else [ranks] if isinstance(ranks, int) else list(ranks)
    numbers: set[int] = set()
    for part in parts:
        found = _STEPS.fullmatch(str(part))
        if found is None or isinstance(part, bool) or int(found[2] or found[1]) < int(found[1]):
            raise ProfileRequestError(f"ranks={ranks} are no ranks: write their numbers, as ranks=0,8 or ranks=0-3,8.")
        if int(found[2] or found[1]) > _LARGEST_RANK:
            raise ProfileRequestError(f"ranks={ranks} go beyond {_LARGEST_RANK:,}, and no job has as many processes.")
        numbers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    if not numbers:
        raise ProfileRequestError("ranks has no rank in it: write their numbers, as ranks=0,8.")
    return tuple(sorted(numbers))


def check_ranks(ranks: tuple[int, ...], world_size: int) -> None:
    """Refuse ranks that the job does not have.

    Raises:
        ProfileRequestError: there is such a rank.
    """
    missing = [str(rank) for rank in ranks if rank >= world_size]
    if missing:
        raise ProfileRequestError(
            f"ranks={','.join(map(str, ranks))}: there is no rank {', '.join(missing)}. This run has {world_size} "
            f"process{'es' if world_size > 1 else ''}: ranks 0 to {world_size - 1}."
        )


def parse_request(text: str, default: ProfileRequest) -> ProfileRequest:
    """Read a request file: `steps=5 ranks=0,3 shapes=true`, in one line or several. `default` holds for keys left out.

    Raises:
        ProfileRequestError: it cannot be understood.
    """
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise ProfileRequestError(f"{text[:80]!r} cannot be read ({error}): write steps=5 ranks=0,3.") from None
    found = default
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ProfileRequestError(f"{word!r} is no KEY=VALUE: write steps=5 ranks=0,3 shapes=true.")
        if key == "steps":
            if not value.isdecimal() or int(value) < 1:
                raise ProfileRequestError(f"steps={value}: in a request, steps is how many to profile, as steps=5.")
            _check_count(int(value))
            found = replace(found, count=int(value))
        elif key == "ranks":
            found = replace(found, ranks=parse_ranks(value))
        elif key in {each.name for each in fields(Details)}:
            if value.lower() not in _BOOLEANS:
                raise ProfileRequestError(f"{word}: write true or false.")
            found = replace(found, details=replace(found.details, **{key: _BOOLEANS[value.lower()]}))
        else:
            raise ProfileRequestError(f"There is no {key!r}: write steps, ranks, shapes, stacks or memory.")
    return found


def _check_count(count: int) -> None:
    if count > _MOST_STEPS:
        raise ProfileRequestError(f"{count} steps are too many for one trace: profile at most {_MOST_STEPS}.")
