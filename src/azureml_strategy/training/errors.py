"""The one error of this package."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class RecipeError(ValueError):
    """A recipe or an override is not what it should be; the message names the near matches."""


def near_matches(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the known words nearest to the one that was typed, or all of a few."""
    words = sorted(set(known))
    near = get_close_matches(word, words, n=3, cutoff=0.75)
    # `max_epoch` is near `trainer.max_epochs`, although most of the letters differ.
    near += [each for each in words if each.rsplit(".", 1)[-1].startswith(word.rsplit(".", 1)[-1]) and each not in near]
    if near:
        return f"Did you mean {' or '.join(map(repr, near[:4]))}?"
    return f"Known: {', '.join(words)}." if len(words) <= 40 else ""
