"""Tells Hydra's overrides from its flags, and writes lists as Hydra does, without importing Hydra."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

# Keys whose values are lists as people write them. To Hydra `0,8` means two runs of a sweep.
_LISTS = re.compile(r"(\+{0,2}profile\.ranks)=([\d\s-]+(?:,[\d\s-]+)+)")


def is_override(argument: str) -> bool:
    """Whether a command-line argument is `key=value`, `+key=value`, `++key=value` or `~key`."""
    return argument.startswith("~") or ("=" in argument and not argument.startswith("-"))


def as_typed(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a running job, such as `HydraConfig.get().overrides.task`, as they were typed.

    Read one by one, they have values in place of `${...}`: a number has become text then, and a secret shows.
    """
    from omegaconf import OmegaConf

    typed: Any = OmegaConf.to_container(cast(Any, overrides), resolve=False)
    return [str(each) for each in typed]


def with_lists(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `profile.ranks=0,8` as Hydra writes a list: `profile.ranks=[0,8]`."""
    return [_LISTS.sub(r"\1=[\2]", each) if _LISTS.fullmatch(each) else each for each in arguments]
