from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.cluster.job import Job, Price, format_money, read_job, read_price
from azureml_strategy.cluster.redaction import redact

SUBSCRIPTION = "5f08e1b6-0000-4000-8000-123456789abc"
ENVIRON = {
    "AZUREML_RUN_ID": "quirky_plum",
    "AZUREML_ROOT_RUN_ID": "pipeline_run",
    "AZUREML_ARM_PROJECT_NAME": "resnet50",
    "AZUREML_ARM_WORKSPACE_NAME": "ws",
    "AZUREML_ARM_RESOURCEGROUP": "rg",
    "AZUREML_ARM_SUBSCRIPTION": SUBSCRIPTION,
    "AZUREML_RUN_TOKEN": "eyJhbGciOiJSUzI1NiJ9.secret.secret",
    "AZ_BATCHAI_CLUSTER_NAME": "gpu-cluster",
}
CONTEXT = {
    "cluster_name": "id-of-cluster",
    "readable_cluster_name": "nd96",
    "vm_size": "Standard_ND96isr_H100_v5",
    "vm_priority": "LowPriority",
    "gpu_count": 8,
    "run_attempt_count": 2,
}


def job(context: Any = None, **more: str) -> Job:
    given = {} if context is None else {"AZUREML_CR_COMPUTE_CONTEXT": json.dumps(context)}
    found = read_job(ENVIRON | given | more)
    assert found is not None
    return found


def test_what_azure_ml_says() -> None:
    assert job(CONTEXT) == Job(
        run_id="quirky_plum",
        root_run_id="pipeline_run",
        experiment="resnet50",
        workspace="ws",
        resource_group="rg",
        subscription=SUBSCRIPTION,
        compute="nd96",
        vm_size="Standard_ND96isr_H100_v5",
        priority="low-priority",
        attempt=2,
        gpus_per_node=8,
    )


def test_what_it_does_not_say_is_none() -> None:
    assert read_job({"AZUREML_RUN_ID": "run"}) == Job("run", "run", *[None] * 7, attempt=0, gpus_per_node=None)


@pytest.mark.parametrize("environ", [{}, {"AZUREML_RUN_ID": ""}, {"AZ_BATCHAI_CLUSTER_NAME": "x"}])
def test_outside_a_job(environ: dict[str, str]) -> None:
    assert read_job(environ) is None


def test_this_process_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_job() is None
    monkeypatch.setenv("AZUREML_RUN_ID", "run")
    found = read_job()
    assert found is not None
    assert found.run_id == "run"


@pytest.mark.parametrize(
    ("context", "flag", "priority"),
    [
        ({"vm_priority": "LowPriority"}, None, "low-priority"),
        ({"vm_priority": "low_priority"}, None, "low-priority"),
        ({"vm_priority": "Spot"}, None, "low-priority"),
        ({"vm_priority": "Dedicated"}, None, "dedicated"),
        ({}, "false", "low-priority"),
        ({}, "true", "dedicated"),
        ({"vm_priority": "Dedicated"}, "false", "low-priority"),
        ({}, None, None),
    ],
)
def test_the_priority(context: dict[str, str], flag: str | None, priority: str | None) -> None:
    more = {} if flag is None else {"AZ_BATCH_NODE_IS_DEDICATED": flag}
    found = job(context, **more)
    assert found.priority == priority


@pytest.mark.parametrize(
    ("context", "more", "gpus"),
    [
        ({"gpu_count": 8}, {"GPU_PER_NODE_COUNT": "4"}, 8),
        ({"gpu_count": "8"}, {}, 8),
        ({}, {"GPU_PER_NODE_COUNT": "8"}, 8),
        ({}, {"AZ_BATCHAI_NUM_GPUS_PER_NODE": "4"}, 4),
        ({}, {"AZ_BATCHAI_GPU_COUNT": "2"}, 2),
        ({}, {"AMLARC_NUM_GPU_PER_WORKER": "1"}, 1),
        ({"gpu_count": None}, {"GPU_PER_NODE_COUNT": "many"}, None),
    ],
)
def test_the_gpus_of_a_node(context: dict[str, Any], more: dict[str, str], gpus: int | None) -> None:
    assert job(context, **more).gpus_per_node == gpus


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(CONTEXT)), inner, max_size=5),
)


@given(st.text(max_size=20) | JSON.map(json.dumps))
def test_no_compute_context_stops_training(context: str) -> None:
    found = read_job(ENVIRON | {"AZUREML_CR_COMPUTE_CONTEXT": context})
    assert found is not None
    assert found.attempt >= 0


def test_secrets_are_not_shown() -> None:
    text = f"{job(CONTEXT)} {job(CONTEXT)!r}"
    assert SUBSCRIPTION not in text
    assert ENVIRON["AZUREML_RUN_TOKEN"] not in text


def test_the_studio_link() -> None:
    scope = f"/subscriptions/{SUBSCRIPTION}/resourcegroups/rg/workspaces/ws"
    assert job().studio_url == f"https://ml.azure.com/runs/quirky_plum?wsid={scope}"
    assert job(AZUREML_ARM_WORKSPACE_NAME="").studio_url is None


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
