from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.cluster.price import Price, format_money, read_price
from azureml_strategy.cluster.redaction import redact


@given(
    st.floats(min_value=0, allow_infinity=False), st.sampled_from(["USD", "EUR"]), st.sampled_from([None, "2026-11-20"])
)
def test_a_job_reads_what_its_submission_wrote(per_hour: float, currency: str, date: str | None) -> None:
    price = Price(per_hour, currency, "Azure Retail Prices", date)
    assert read_price(price.as_variables()) == price
    assert redact("", price.as_variables()) == price.as_variables()


@pytest.mark.parametrize("text", ["", "free", "nan", "-1", "inf"])
def test_a_price_that_cannot_be_read_is_none(text: str) -> None:
    assert read_price({"AZUREML_STRATEGY_PRICE_PER_HOUR": text}) is None
    assert read_price({}) is None


def test_in_words() -> None:
    assert str(Price(98.32, "USD", "Azure Retail Prices", "2026-11-20")) == (
        "98.32 USD/h, Azure Retail Prices, 2026-11-20"
    )
    assert str(Price(1250.0, "EUR", "cluster.price_per_hour")) == "1,250 EUR/h, cluster.price_per_hour"
    with pytest.raises(ValueError, match="no price"):
        Price(math.nan, "USD", "x")


def test_money_in_words() -> None:
    assert [format_money(amount) for amount in (0, 0.00123456, 0.5, 12.3456, 98765.4)] == [
        *("0.00", "0.001235", "0.5", "12.35", "98,765.40")
    ]
