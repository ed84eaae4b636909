"""Tells Hydra's overrides from its flags without importing Hydra."""

from __future__ import annotations


def is_override(argument: str) -> bool:
    """Whether a command-line argument is `key=value`, `+key=value`, `++key=value` or `~key`."""
    return argument.startswith("~") or ("=" in argument and not argument.startswith("-"))
