"""What one node of the job costs, as whoever submitted the job has told its processes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

_PREFIX = "AZUREML_STRATEGY_PRICE_"


@dataclass(frozen=True)
class Price:
    """The price of one node.

    Attributes:
        per_hour: of one node, in `currency`.
        currency: ISO 4217 code, such as `USD`.
        source: who says so: `Azure Retail Prices`, or the key that the user has set.
        date: the day on which the source was asked, as an ISO date; None for a price that the user has set.

    Raises:
        ValueError: a price that is negative or no number.
    """

    per_hour: float
    currency: str
    source: str
    date: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.per_hour < math.inf:
            raise ValueError(
                f"{self.source} says {self.per_hour} {self.currency} an hour, which is no price. Give the price of one "
                "node and hour, or null for none."
            )

    def as_variables(self) -> dict[str, str]:
        """The environment variables that `read_price` reads."""
        variables = {
            f"{_PREFIX}PER_HOUR": repr(self.per_hour),
            f"{_PREFIX}CURRENCY": self.currency,
            f"{_PREFIX}SOURCE": self.source,
        }
        return variables if self.date is None else variables | {f"{_PREFIX}DATE": self.date}

    def __str__(self) -> str:
        date = f", {self.date}" if self.date else ""
        return f"{self.per_hour:,.10g} {self.currency}/h, {self.source}{date}"


def read_price(environ: Mapping[str, str] | None = None) -> Price | None:
    """The price in the job's variables; None where there is none.

    A price must not stop training: one that cannot be read counts as absent.

    Args:
        environ: the environment to read; that of this process by default.
    """
    environ = os.environ if environ is None else environ
    try:
        return Price(
            per_hour=float(environ[f"{_PREFIX}PER_HOUR"]),
            currency=environ.get(f"{_PREFIX}CURRENCY") or "USD",
            source=environ.get(f"{_PREFIX}SOURCE") or f"{_PREFIX}PER_HOUR",
            date=environ.get(f"{_PREFIX}DATE") or None,
        )
    except (KeyError, ValueError):
        return None


def format_money(amount: float) -> str:
    """Cents where they matter, else four digits."""
    return f"{amount:,.2f}" if amount >= 1 or amount == 0 else f"{amount:.4g}"
