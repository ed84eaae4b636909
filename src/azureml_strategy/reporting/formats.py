"""Writes figures the way people read them."""

from __future__ import annotations

from datetime import UTC, datetime

from azureml_strategy.cluster.job import format_money

_LAST_MS = 253402300800000  # the end of the year 9999, beyond which Python has no dates
_DAY_S, _HOUR_S, _MINUTE_S = 86400, 3600, 60


def duration(seconds: float) -> str:
    """A time span with its two largest units: `2 h 5 min`."""
    whole = round(seconds)
    if whole < _MINUTE_S:
        return f"{whole} s" if seconds >= 10 or whole == seconds else f"{seconds:.1f} s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S} min {whole % _MINUTE_S} s"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S} min"
    return f"{whole // _DAY_S} d {whole % _DAY_S // _HOUR_S} h"


def moment(at_ms: float) -> str:
    """A time in ms since 1970, in UTC: `2026-11-23 14:05 UTC`."""
    if not 0 <= at_ms < _LAST_MS:
        return "an unknown time"
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")


def figure(value: float) -> str:
    """A number with four significant digits: `1,234`, `0.01234`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def money(amount: float, currency: str) -> str:
    """An amount with its currency."""
    return f"{format_money(amount)} {currency}"


def count(number: float, thing: str) -> str:
    """A number of things: `1 node`, `2 nodes`."""
    return f"{number:,.0f} {thing}{'s' * (round(number) != 1)}"
