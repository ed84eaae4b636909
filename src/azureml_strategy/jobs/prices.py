"""Finds the price of a node: the user's own, or the one of Azure's public price list, cached with its date."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from azureml_strategy.cluster.job import Price
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.files import write_atomically
from azureml_strategy.jobs.client import quiet_sdk
from azureml_strategy.jobs.resources import SERVERLESS
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.network.vm_sizes import VMSize, lookup_vm_size

if TYPE_CHECKING:
    from azure.ai.ml.entities import Command

    from azureml_strategy.jobs.plan import JobPlan

__all__ = ["Price", "price_for"]

ADDRESS = "https://prices.azure.com/api/retail/prices"
_ENDINGS = {" Spot": "spot", " Low Priority": "low_priority"}
TIERS = ("dedicated", *_ENDINGS.values())
# Short timeouts: a job is submitted with or without its price, so it must not wait long for one.
_TIMEOUTS: dict[str, Any] = {"connection_timeout": 5, "read_timeout": 20}
_RETRIES, _BACKOFF_S = 2, 0.4  # for a busy service (429, 5xx) or a dropped connection; Retry-After is obeyed

_SOURCE = "Azure Retail Prices"

log = logging.getLogger(__name__)


class PricesUnavailable(RuntimeError):  # noqa: N818 - reads as what happened
    """The service did not answer with prices. The message is the HTTP reason or the name of the error."""


class _Meter(NamedTuple):
    """One item that Azure bills: a Linux VM in a tier, with a price that applies now."""

    tier: str
    price: float
    start: str


def _read_meter(item: dict[str, Any]) -> _Meter | None:
    """Read an item of the service's JSON; None for what is not the price of a Linux VM that applies now.

    Raises:
        KeyError: the item has not the documented shape.
    """
    name, product, price = item["meterName"], item["productName"], float(item["retailPrice"])
    unit, kind, start = item["unitOfMeasure"], item["type"], item["effectiveStartDate"]
    end = item.get("effectiveEndDate") or "9999"
    # Linux and Windows have meters of the same name. Only the product's name tells them apart.
    other = any(each in product for each in ("Windows", "Cloud Services", "Dedicated Host"))
    if other or (unit, kind) != ("1 Hour", "Consumption"):
        return None
    if not (price > 0 and start <= datetime.now(UTC).isoformat() < end):
        return None
    # The tier ends the meter's name: `ND96isrH100v5 Spot`.
    tier = next((tier for ending, tier in _ENDINGS.items() if name.endswith(ending)), "dedicated")
    return _Meter(tier, price, start)


def prices_by_tier(vm_size: str, region: str, currency: str, address: str = ADDRESS) -> dict[str, float]:
    """The price of one Linux VM per hour, for each tier that has an unambiguous price.

    The service may be case-sensitive: the size is in Azure's spelling, `Standard_ND96isr_H100_v5`, and the region is
    such as `eastus`.

    Raises:
        PricesUnavailable: the service did not answer with prices.
    """
    meters = _fetch(vm_size, region, currency, address)
    found = {tier: _one_price([each for each in meters if each.tier == tier], vm_size, tier) for tier in TIERS}
    return {tier: price for tier, price in found.items() if price is not None}


def _fetch(vm_size: str, region: str, currency: str, address: str) -> list[_Meter]:
    quiet_sdk()
    from azure.core import PipelineClient
    from azure.core.exceptions import AzureError
    from azure.core.pipeline.policies import RetryPolicy
    from azure.core.rest import HttpRequest, HttpResponse

    wanted = {
        "serviceName": "Virtual Machines",
        "priceType": "Consumption",
        "armRegionName": region,
        "armSkuName": vm_size,
    }
    query = " and ".join(f"{name} eq '{value}'" for name, value in wanted.items())
    request = HttpRequest("GET", address, params={"currencyCode": f"'{currency}'", "$filter": query})
    meters: list[_Meter] = []
    retry = RetryPolicy(retry_total=_RETRIES, retry_connect=0, retry_backoff_factor=_BACKOFF_S)
    client: PipelineClient[HttpRequest, HttpResponse] = PipelineClient(address, policies=[retry], **_TIMEOUTS)
    try:
        with client:
            while True:
                answer = client.send_request(request)
                answer.raise_for_status()
                page = answer.json()
                meters += filter(None, map(_read_meter, page["Items"]))
                if not page.get("NextPageLink"):
                    return meters
                request = HttpRequest("GET", page["NextPageLink"])
    except (AzureError, ValueError, KeyError, TypeError) as error:
        raise PricesUnavailable(getattr(error, "reason", None) or type(error).__name__) from error


def _one_price(meters: Sequence[_Meter], vm_size: str, tier: str) -> float | None:
    """The newest price; None if there is none, or if several contradict one another."""
    newest = max((each.start for each in meters), default="")
    prices = {each.price for each in meters if each.start == newest}
    if len(prices) > 1:
        log.warning("Azure Retail Prices names %s for %s, %s: none is taken.", sorted(prices), vm_size, tier)
    return prices.pop() if len(prices) == 1 else None


class _Cached(TypedDict):
    """Prices of each tier, with the day (UTC) on which the service gave them."""

    date: str
    prices: dict[str, float]


def add_price(plan: JobPlan, job: Command, region: str | None, *, offline: bool) -> Price | None:
    """Find the price of one node, and give it to the job in its environment variables, unless the job is a plain one.

    Args:
        plan: the plan that names the cluster.
        job: the rendered plan. Its own variables take precedence.
        region: region of the cluster.
        offline: make no request, and use the cached prices only.

    Returns:
        The price; None if it is unknown.

    Raises:
        JobError: the price that the user gives is invalid.
    """
    cluster, size = plan.cluster, plan.size
    if size is None and cluster.price_per_hour is None:
        return None
    name = size.name if size else ""
    # Low-priority nodes on serverless compute have the spot price, not that of a cluster.
    tier = "spot" if cluster.compute == SERVERLESS and cluster.tier == "low_priority" else cluster.tier
    try:
        price = price_for(name, region, tier, cluster.price_per_hour, currency=cluster.currency, offline=offline)
    except ValueError as error:
        raise JobError(str(error)) from error
    if price is not None and not plan.job.plain:
        job.environment_variables = {**price.as_variables(), **job.environment_variables}
    return price


def price_for(
    vm_size: str,
    region: str | None,
    tier: str,
    configured: float | None = None,
    *,
    offline: bool = False,
    currency: str = "USD",
    address: str = ADDRESS,
    asked: PriceList | None = None,
) -> Price | None:
    """The price of one node, or None if it is unknown.

    The service's prices are cached with their date in `~/.cache/azureml_strategy/prices` (XDG_CACHE_HOME). If the
    service cannot be reached, the cached prices are used, with their date.

    Args:
        vm_size: name of the VM size, in any case, with or without `Standard_`.
        region: region, such as `eastus` or `East US`. None means unknown; then only `configured` gives a price.
        tier: `dedicated`, `low_priority`, or `spot` for a serverless spot job.
        configured: what the user pays for one node and hour, in `currency`. It takes precedence.
        offline: make no request, and use the cached prices only.
        currency: ISO 4217 code. Azure's own prices are in USD; Azure says that others only help to estimate.
        address: address of the service.
        asked: is told if the service gives no answer.

    Raises:
        JobError: there is no such tier.
        UnknownVMSize: no VM size can have this name.
        ValueError: `configured` is not a valid price.
    """
    if tier not in TIERS:
        raise JobError(f"There is no tier {tier!r}. Use one of {', '.join(TIERS)}.")
    if configured is not None:
        return Price(configured, currency, "cluster.price_per_hour")
    if region is None:
        return None
    size, place = lookup_vm_size(vm_size).name, re.sub(r"[^a-z0-9]", "", region.lower())
    known = _tier_prices(size, place, currency, address, offline, asked)
    if known is None or tier not in known["prices"]:
        return None
    return Price(known["prices"][tier], currency, _SOURCE, known["date"])


class PriceList:
    """Finds the prices of many sizes. A service that gave no answer is not asked again.

    Args:
        region: region, such as `eastus`; None for no prices.
        tier: `dedicated`, `low_priority` or `spot`.
        currency: ISO 4217 code.
        address: of the service.
    """

    def __init__(self, region: str | None, tier: str, currency: str = "USD", address: str = ADDRESS) -> None:
        self.is_away = False
        self._region, self._tier, self._currency, self._address = region, tier, currency, address

    def price_of(self, size: VMSize) -> Price | None:
        """The price of one node, or None if it is unknown.

        Raises:
            JobError: there is no such tier.
        """
        return price_for(
            size.name,
            self._region,
            self._tier,
            offline=self.is_away,
            currency=self._currency,
            address=self._address,
            asked=self,
        )


def _tier_prices(
    size: str, region: str, currency: str, address: str, offline: bool, asked: PriceList | None = None
) -> _Cached | None:
    """The prices of a size by tier: today's, from the cache or the service; older ones if the service is away."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    file = caches / "azureml_strategy" / "prices" / f"{size}-{region}-{currency}.json".lower()
    cached: _Cached | None = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    today = datetime.now(UTC).date().isoformat()
    if offline or (cached is not None and cached["date"] == today):
        return cached
    try:
        fresh = _Cached(date=today, prices=prices_by_tier(size, region, currency, address))
    except PricesUnavailable as error:
        if asked is not None:
            asked.is_away = True
        instead = f"Its prices of {cached['date']} are used." if cached else "Set cluster.price_per_hour to track cost."
        log.warning(
            "Azure Retail Prices gave no answer for %s in %s (%s). %s", size, region, redact_text(str(error)), instead
        )
        return cached
    write_atomically(file, json.dumps(fresh).encode())  # another submission may read it at the same time
    return fresh
