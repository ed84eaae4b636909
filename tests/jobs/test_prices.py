"""Prices, from a loopback server that plays the Azure Retail Prices service."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from azureml_strategy.cluster.job import Price
from azureml_strategy.jobs.prices import price_for
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.network import UnknownVMSize

SIZE = "Standard_ND96isr_H100_v5"
SERIES = "Virtual Machines NDsr H100 v5 Series"


def meter(name: str, price: float, product: str = SERIES, **fields: Any) -> dict[str, Any]:
    """One item, with the fields of the service's answers; the prices are those of eastus in September 2026."""
    item = {
        "currencyCode": "USD",
        "tierMinimumUnits": 0.0,
        "retailPrice": price,
        "unitPrice": price,
        "armRegionName": "eastus",
        "location": "US East",
        "effectiveStartDate": "2023-08-01T00:00:00Z",
        "meterName": name,
        "productName": product,
        "skuName": name,
        "serviceName": "Virtual Machines",
        "serviceFamily": "Compute",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "isPrimaryMeterRegion": True,
        "armSkuName": SIZE,
    }
    return item | fields


# Linux and Windows share the meter's name.
METERS = [
    meter("ND96isrH100v5", 102.736, f"{SERIES} Windows"),
    meter("ND96isrH100v5", 98.32),
    meter("ND96isrH100v5 Spot", 18.169536),
    meter("ND96isrH100v5 Low Priority", 41.094, f"{SERIES} Windows"),
]


class Service:
    """Answers with pages of meters, or with what is told first."""

    def __init__(self) -> None:
        self.pages: list[list[dict[str, Any]]] = [METERS]
        self.first: list[int] = []  # statuses to answer with before the pages; 0 drops the connection
        self.requests: list[dict[str, list[str]]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                service.answer(self)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}/api/retail/prices"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        query = parse_qs(urlsplit(handler.path).query)
        self.requests.append(query)
        status = self.first.pop(0) if self.first else 200
        if status == 0:
            handler.connection.close()
            return
        page = int(query.get("$skip", ["0"])[0])
        following = f"{self.address}?$skip={page + 1}" if page + 1 < len(self.pages) else None
        items = self.pages[page] if status == 200 else []
        body = json.dumps({"BillingCurrency": "USD", "Items": items, "NextPageLink": following, "Count": len(items)})
        handler.send_response(status)
        if status == 429:
            handler.send_header("Retry-After", "0")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body.encode())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    service = Service()
    yield service
    service.close()


def cached(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "caches/azureml_strategy/prices").iterdir()
    return file


@pytest.mark.parametrize(("tier", "price"), [("dedicated", 98.32), ("spot", 18.169536), ("low_priority", None)])
def test_the_linux_meter_of_the_tier(service: Service, tier: str, price: float | None) -> None:
    found = price_for("nd96isr_h100_v5", "East US", tier, address=service.address)
    assert (found.per_hour if found else None) == price
    assert service.requests == [
        {
            "currencyCode": ["'USD'"],
            "$filter": [
                "serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and armRegionName eq 'eastus' "
                f"and armSkuName eq '{SIZE}'"
            ],
        }
    ]


def test_is_asked_for_once_a_day_and_kept_with_its_date(service: Service, tmp_path: Path) -> None:
    first = price_for(SIZE, "eastus", "dedicated", address=service.address)
    assert first == price_for(SIZE, "eastus", "dedicated", address=service.address)
    assert first == price_for(SIZE, "eastus", "dedicated", address=service.address, offline=True)
    assert price_for(SIZE, "westeurope", "dedicated", address=service.address, offline=True) is None
    assert len(service.requests) == 1
    assert first is not None
    assert (first.source, first.currency) == ("Azure Retail Prices", "USD")
    assert first.date == json.loads(cached(tmp_path).read_text())["date"]


def test_an_old_price_is_asked_for_again_and_stands_when_the_service_is_away(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    price_for(SIZE, "eastus", "dedicated", address=service.address)
    cached(tmp_path).write_text(json.dumps({"date": "2026-01-02", "prices": {"dedicated": 90.0}}))
    service.first = [503, 503, 503]
    old = price_for(SIZE, "eastus", "dedicated", address=service.address)
    assert old == Price(90.0, "USD", "Azure Retail Prices", "2026-01-02")
    assert "Its prices of 2026-01-02 are used" in caplog.text
    new = price_for(SIZE, "eastus", "dedicated", address=service.address)
    assert new is not None
    assert new.per_hour == 98.32


def test_a_busy_service_and_a_dropped_connection_are_tried_again(service: Service) -> None:
    service.first = [429, 0]
    found = price_for(SIZE, "eastus", "dedicated", address=service.address)
    assert found is not None
    assert len(service.requests) == 3


def test_every_page_is_read(service: Service) -> None:
    service.pages = [METERS[:1], METERS[1:]]
    found = price_for(SIZE, "eastus", "dedicated", address=service.address)
    assert found is not None
    assert [each.get("$skip") for each in service.requests] == [None, ["1"]]


@pytest.mark.parametrize("answer", ["away", "refused", "another shape", "no number"])
def test_no_answer_is_no_price(service: Service, answer: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    if answer == "another shape":
        service.pages = [[{"meterName": "ND96isrH100v5"}]]
    if answer == "no number":
        service.pages = [[{**METERS[1], "retailPrice": None}]]
    service.first = [404] if answer == "refused" else []
    address = service.address if answer != "away" else "http://127.0.0.1:9/api/retail/prices"  # nobody is there
    assert price_for(SIZE, "eastus", "dedicated", address=address) is None
    assert "Set cluster.price_per_hour" in caplog.text
    assert not (tmp_path / "caches").exists()


@pytest.mark.parametrize(
    ("meters", "price"),
    [
        ([], None),
        ([meter("ND96isrH100v5", 0.0)], None),
        ([meter("ND96isrH100v5", 90.0, type="Reservation")], None),
        ([meter("ND96isrH100v5", 90.0, unitOfMeasure="1/Month")], None),
        ([meter("ND96isrH100v5", 90.0, effectiveEndDate="2024-01-01T00:00:00Z")], None),
        ([meter("ND96isrH100v5", 90.0, "NDsr H100 v5 Series Cloud Services")], None),
        # the newest of those that hold; two that contradict one another are none
        ([meter("a", 90.0), meter("a", 80.0, effectiveStartDate="2025-01-01T00:00:00Z")], 80.0),
        ([meter("a", 90.0), meter("a", 80.0, effectiveStartDate="2999-01-01T00:00:00Z")], 90.0),
        ([meter("a", 90.0), meter("b", 90.0)], 90.0),
        ([meter("a", 90.0), meter("b", 80.0)], None),
    ],
)
def test_nothing_is_guessed(service: Service, meters: list[dict[str, Any]], price: float | None) -> None:
    service.pages = [meters]
    found = price_for(SIZE, "eastus", "dedicated", address=service.address)
    assert (found.per_hour if found else None) == price


def test_the_users_own_price_goes_first_and_asks_nobody(service: Service) -> None:
    found = price_for(SIZE, None, "low_priority", 12.5, currency="EUR", address=service.address)
    assert found == Price(12.5, "EUR", "cluster.price_per_hour")
    assert price_for(SIZE, None, "dedicated", address=service.address) is None
    assert service.requests == []


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(JobError, match=r"no tier 'cheap'. Use one of dedicated, spot, low_priority"):
        price_for(SIZE, "eastus", "cheap")
    with pytest.raises(UnknownVMSize):
        price_for("a' or 'b", "eastus", "dedicated", offline=True)
    with pytest.raises(ValueError, match="which is no price"):
        price_for(SIZE, None, "dedicated", -1.0)
