"""What one node costs: the user's own price, else Azure's, asked for at most once a day; never a guess."""

from __future__ import annotations

import json
import logging
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

from azureml_strategy.cluster.job import Price
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.jobs.errors import JobError
from azureml_strategy.jobs.retail_prices import ADDRESS, TIERS, PricesUnavailable, prices_by_tier
from azureml_strategy.network.vm_sizes import lookup_vm_size

__all__ = ["Price", "price_for"]

log = logging.getLogger(__name__)

_SOURCE = "Azure Retail Prices"


class _Cached(TypedDict):
    """What the service said on a day (UTC)."""

    date: str
    prices: dict[str, float]


def price_for(
    vm_size: str,
    region: str | None,
    tier: str,
    configured: float | None = None,
    *,
    offline: bool = False,
    currency: str = "USD",
    address: str = ADDRESS,
) -> Price | None:
    """The price of one node, or None where nobody knows it.

    What the service says is kept with its date in `~/.cache/azureml_strategy/prices` (XDG_CACHE_HOME). When it cannot
    be reached, what it said last stands, with the date of then.

    Args:
        vm_size: in any case, with or without `Standard_`.
        region: such as `eastus` or `East US`; None if it is not known, and then only `configured` can help.
        tier: `dedicated`, `low_priority`, or `spot` for a serverless spot job.
        configured: what the user pays for one node and hour, in `currency`; it goes before all else.
        offline: ask nobody; what was said earlier still counts.
        currency: ISO 4217 code. Azure's own prices are in USD; others are a help to estimate, as Azure says.
        address: of the service.

    Raises:
        JobError: there is no such tier.
        UnknownVMSize: no VM size can have this name.
        ValueError: `configured` is no price.
    """
    if tier not in TIERS:
        raise JobError(f"There is no tier {tier!r}. Use one of {', '.join(TIERS)}.")
    if configured is not None:
        return Price(configured, currency, "cluster.price_per_hour")
    if region is None:
        return None
    size, place = lookup_vm_size(vm_size).name, re.sub(r"[^a-z0-9]", "", region.lower())
    known = _known(size, place, currency, address, offline)
    if known is None or tier not in known["prices"]:
        return None
    return Price(known["prices"][tier], currency, _SOURCE, known["date"])


def _known(size: str, region: str, currency: str, address: str, offline: bool) -> _Cached | None:
    file = _cache_folder() / f"{size}-{region}-{currency}.json".lower()
    cached: _Cached | None = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    today = datetime.now(UTC).date().isoformat()
    if offline or (cached is not None and cached["date"] == today):
        return cached
    try:
        fresh = _Cached(date=today, prices=prices_by_tier(size, region, currency, address))
    except PricesUnavailable as error:
        instead = f"Its prices of {cached['date']} are used." if cached else "Set cluster.price_per_hour to track cost."
        log.warning(
            "Azure Retail Prices gave no answer for %s in %s (%s). %s", size, region, redact_text(str(error)), instead
        )
        return cached
    _write(file, json.dumps(fresh))
    return fresh


def _cache_folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "azureml_strategy" / "prices"


def _write(file: Path, text: str) -> None:
    """Complete or not there: other submissions may read it at this moment."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)
