"""Finds variables of this package without effect: misspelt names, and values that switch nothing off."""

from __future__ import annotations

from collections.abc import Mapping

from azureml_strategy.cluster.environ import (
    CHECKPOINT_SWITCH,
    EVENTS_VARIABLE,
    HANG_WATCH_SWITCH,
    PLANNED_VARIABLES,
    SWITCHES,
    copied,
)
from azureml_strategy.cluster.job import read_price

_PREFIX = "AZUREML_STRATEGY_"
# Those that other rooms read.
_OTHERS = (
    "RESUME",
    "LAUNCHER",
    "MAX_SAMPLES",
    *(f"PRICE_{each}" for each in ("PER_HOUR", "CURRENCY", "SOURCE", "DATE")),
)
_PRICE = f"{_PREFIX}PRICE_PER_HOUR"
KNOWN = (*SWITCHES, EVENTS_VARIABLE, PLANNED_VARIABLES, *(f"{_PREFIX}{each}" for each in _OTHERS))
# These take other words than `off`. The code that reads them warns of a wrong word.
_WITH_WORDS = (CHECKPOINT_SWITCH, HANG_WATCH_SWITCH)
_MEANS_ON = ("", "on", "1", "true", "yes")


def variables_without_effect(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable `AZUREML_STRATEGY_*` that is set and does nothing."""
    environ, found = copied(environ), []
    for name in sorted(name for name in environ if name.upper().startswith(_PREFIX)):
        value = environ[name]
        if name not in KNOWN:
            found.append(f"{name} is set, and nothing reads it.{_meant(name)}")
        elif name in SWITCHES and name not in _WITH_WORDS and value.strip().lower() not in (*_MEANS_ON, "off"):
            found.append(f"{name}={value!r} switches nothing off. Write {name}=off, or remove it.")
    if environ.get(_PRICE) and read_price(environ) is None:
        found.append(f"{_PRICE}={environ[_PRICE]!r} is no price, and no cost is told. Write a number such as 3.5.")
    return found


def _meant(name: str) -> str:
    from difflib import get_close_matches  # only here

    near = get_close_matches(name.upper(), KNOWN, n=1, cutoff=0.85)
    return f" Did you mean {near[0]}?" if near else " Remove it, or look the name up in the documentation."
