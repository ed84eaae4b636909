"""Runs whose names, values and files are meant to do harm, or are broken: a page all the same."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path

import pytest
from mlflow import MlflowClient
from tests.reporting.example import log_points, log_run
from tests.reporting.test_page import Reader

from azureml_strategy.cli import main
from azureml_strategy.reporting.collect import collect_run
from azureml_strategy.reporting.comparison import compare_page
from azureml_strategy.reporting.page import render
from azureml_strategy.reporting.run_page import marks_of, run_page

ODD = "<script>alert(1)</script>\"'`a`\n\u202e\U0001f600 \x01 $x^2_{$ {{7*7}} %s {0}"
NAMES = ["<img src=x onerror=alert(1)>", "a\x00b", "\u202e", "{{7*7}}", "$\\frac$", "ghp_abcdefghijklmnopqrst123456"]
SECRETS = ["hf_abcdefghijklmnop1234", "Zm9vYmFyYmF6cXV4Zm9vYmFyYmF6cXV4", "S3cr3tPassw0rd", NAMES[-1]]
EVENTS = """{"kind": "crash", "text": "<b>", "step": 1e400, "time_ms": 5}
{"kind": "crash", "text": "<b>", "step": 1, "time_ms": 99999999999999999999}
{"kind": "nonsense", "text": "x", "step": 5, "time_ms": 9}
{"kind": ["x"], "text": {}, "step": "7", "time_ms": "8"}
[]
"""
RANKS = """{"ranks": [{"rank": "<b>", "host": {}}, {"rank": 0, "host": "<i>"}], "windows": [
{"step": "a", "compute_s": [1, 2]}, {"step": 1, "compute_s": [NaN, Infinity], "slow": {"0": "<u>"}},
{"step": 2, "compute_s": [0, 0], "slow": ["abc"], "data_wait_s": ["x", 1]}, {"step": 1e999, "compute_s": [1]},
{"step": 3, "compute_s": [1, 2], "slow": {"0": "x"}}]}"""
NETWORK = '{"nodes": [3, {"host": {}, "settings": [1, {"variable": "<b>"}], "kept": null}, {"settings": 7}]}'


def test_texts_values_and_files_that_mean_harm(client: MlflowClient, store: str) -> None:
    run_id = client.create_run("0", run_name=ODD).info.run_id
    client.log_param(run_id, "hub_token", SECRETS[0])
    client.log_param(run_id, "url", f"https://a.blob.core.windows.net/c?sv=2022-11-02&sig={SECRETS[1]}")
    client.set_tag(run_id, "azureml_strategy.command", f"train --store postgresql://me:{SECRETS[2]}@host/db")
    for tag in ("mlflow.source.git.commit", "throughput.unit", "cost.currency", "azureml_strategy.optimizer"):
        client.set_tag(run_id, tag, ODD)
    values = (math.nan, math.inf, -math.inf, 1e308, -1e308, 1e-320)
    log_points(client, run_id, [("wild", value, step, 9 + step) for step, value in enumerate(values)])
    for name in ("cost/run", "summary/step_time_median_s", "time/training_s", "step/data_wait_share", "time/steps"):
        log_points(client, run_id, [(name, math.inf if "/s" in name else math.nan, 0, 5)])
    for name in ("summary/nodes", "summary/devices", "time/goodput"):
        log_points(client, run_id, [(name, math.inf, 0, 5)])
    log_points(client, run_id, [("one", 3.0, 7, 5), ("late", 1.0, 2**62, 2**62), ("early", 1.0, -5, 0)])
    with sqlite3.connect(store.removeprefix("sqlite:///")) as database:
        points = "(key, value, timestamp, step, run_uuid, is_nan) VALUES (?, 1.0, ?, ?, ?, 0)"
        for name in NAMES:
            database.executemany(f"INSERT INTO metrics {points}", [(name, step, step, run_id) for step in range(3)])
            database.execute(f"INSERT INTO latest_metrics {points}", (name, 2, 2, run_id))
            database.execute("INSERT INTO params (key, value, run_uuid) VALUES (?, ?, ?)", (name, name, run_id))
            database.execute("INSERT INTO tags (key, value, run_uuid) VALUES (?, ?, ?)", (name, name, run_id))
    client.log_text(run_id, EVENTS + "[" * 100_000, "events/attempt_0.jsonl")
    client.log_text(run_id, RANKS, "ranks/attempt_0.json")
    client.log_text(run_id, NETWORK, "network.json")
    client.log_text(run_id, "a: \x00<script>", "config.yaml")
    record = collect_run(run_id, store)
    assert [event.step for event in record.events] == [1]
    for text in (render(run_page(record)), render(compare_page([record, record]))):
        read = Reader(text)
        assert (read.scripts, read.fetched) == (0, [])
        assert "<img" not in text
        assert "\x00" not in text
        assert not [secret for secret in SECRETS if secret in text]


def test_runs_with_long_names_are_told_apart(store: str) -> None:
    names = ["resnet50_imagenet 2 nodes", "resnet50_imagenet 2 nodes lr=0.1", "resnet50_imagenet 2 nodes lr=0.2"]
    text = render(compare_page([collect_run(log_run(store, name, windows=2), store) for name in names]))
    assert [text.count(f">{label}<") > 1 for label in ("resnet50_...et 2 nodes", "resnet50_...des lr=0.1")] == [
        True
    ] * 2


def test_figures_are_those_of_the_points(client: MlflowClient, store: str) -> None:
    run_id = client.create_run("0").info.run_id
    log_points(client, run_id, [("loss", 1.0, step, step) for step in range(1001)])
    assert collect_run(run_id, store).steps == 1001  # of the last point, not of the last bucket's middle
    log_points(client, run_id, [("time/steps", 1000.0, 1000, 5)])
    assert collect_run(run_id, store).steps == 1000
    # Hooks without a checkpoint take some 50 us a step.
    seconds = [0.0005, 0.001, 0.0145, 0.015, 0.0416, 0.0421]
    log_points(client, run_id, [("time/checkpoint_s", value, 9 + 10 * at, at) for at, value in enumerate(seconds)])
    assert [step for _, step in marks_of(collect_run(run_id, store)).checkpoints] == [29, 49]


def test_counters_that_stay_zero_are_one_sentence(client: MlflowClient, store: str) -> None:
    run_id = client.create_run("0").info.run_id
    log_points(client, run_id, [("system/ethernet_errors", 0.0, step, step) for step in range(3)])
    log_points(client, run_id, [("system/cpu", 1.0 + step, step, step) for step in range(3)])
    text = render(run_page(collect_run(run_id, store)))
    assert "Zero all the time: ethernet errors." in text
    assert Reader(text).charts == ["cpu"]


@pytest.mark.parametrize("name", ["\udcff", "a\x00b"])
def test_a_name_that_no_run_can_have(
    store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", name, "--store", store]) == 2
    assert "is no run id, folder or file" in capsys.readouterr().err
