"""The planner's rate beside the measured one, on the page of a run and of several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from tests.reporting.example import log_run
from tests.tracking.test_expected import EXPECTED

from azureml_strategy.cli import main
from azureml_strategy.network.vm_sizes import lookup_vm_size
from azureml_strategy.planning.expected import expect_rate
from azureml_strategy.reporting.collect import RunRecord, collect_run
from azureml_strategy.reporting.comparison import compare_page
from azureml_strategy.reporting.page import figure, render
from azureml_strategy.reporting.run_page import run_page
from azureml_strategy.tracking.expected import EXPECTED_RATE_TAG

MEASURED = 4700.0  # of tests/reporting/example.py


def told(client: MlflowClient, store: str, share: float, text: str | None = None) -> RunRecord:
    """A run that reached this share of what was expected of it."""
    run_id, rate = log_run(store, windows=6), MEASURED / share
    expected = replace(EXPECTED, samples_per_second=rate, low=0.9 * rate, high=1.1 * rate)
    client.set_tag(run_id, EXPECTED_RATE_TAG, expected.to_text() if text is None else text)
    return collect_run(run_id, store)


def test_half_of_what_it_should_be(client: MlflowClient, store: str) -> None:
    page = run_page(told(client, store, 0.5))
    assert page.verdict["What it should be"].startswith(
        "4,700 images/s are 50% of what 2 x Standard_ND96isr_H100_v5 should do, below 70%: the planner expected 9,400 "
    )
    assert "waiting for data (" in page.verdict["What it should be"]
    (tile,) = [each for each in page.tiles if "planned" in each.name]
    assert (tile.name, tile.value) == ("images per second, planned", "9,400")
    assert tile.more == "8,460 to 10,340 on 2 x Standard_ND96isr_H100_v5; 50% of it measured"
    assert "9,400" in render(page)


def test_as_fast_as_planned(client: MlflowClient, store: str) -> None:
    page = run_page(told(client, store, 0.9))
    assert "What it should be" not in page.verdict
    assert [each.value for each in page.tiles if "planned" in each.name] == ["5,222"]


@pytest.mark.parametrize("text", ["{", "<b>", "NaN", '{"samples_per_second": "<script>"}', EXPECTED.to_text()[:-9]])
def test_a_tag_that_is_none_is_left_out(client: MlflowClient, store: str, text: str) -> None:
    page = run_page(told(client, store, 0.5, text))
    assert not [each for each in page.tiles if "planned" in each.name]


def test_an_emulated_run_says_nothing(client: MlflowClient, store: str) -> None:
    record = told(client, store, 0.5)
    client.set_tag(record.run.run_id, "azureml_strategy.emulated", "true")
    assert collect_run(record.run.run_id, store).rate_check is None


def test_beside_one_another(client: MlflowClient, store: str) -> None:
    page = compare_page([told(client, store, 0.5), collect_run(log_run(store, windows=6), store)])
    rows = {row[0]: list(row[1:]) for row in page.sections[0].tables[0].rows}
    assert rows["planned samples per second"] == ["9,400", ""]


def test_a_run_that_was_not_told_is_planned_at_the_desk(
    client: MlflowClient, store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    run_id = log_run(store, windows=6)
    client.log_param(run_id, "model/network/_target_", "azureml_strategy.models.ResNet50")
    assert main(["report", run_id, "--store", store]) == 0
    size = lookup_vm_size("Standard_NC96ads_A100_v4")
    planned = expect_rate("resnet50_imagenet", ["data.num_workers=4"], size, 2)
    text = Path("report.html").read_text()
    assert figure(planned.samples_per_second) in text
    assert f"of what {planned.place} should do" in text
    # A run makes its page itself, with its status, and is not kept waiting for a plan.
    assert main(["report", run_id, "--store", store, "--status", "FINISHED"]) == 0
    assert "planned" not in Path("report.html").read_text()
