"""Runs of any kind in a real SQLite store, read back."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import RunTag
from tests.reporting.example import SHARES, log_points, log_run

from azureml_strategy.reporting import profiles, stores
from azureml_strategy.reporting.advice import facts_of, verdict_of
from azureml_strategy.reporting.collect import choose_metrics, collect_run
from azureml_strategy.reporting.stores import DatabaseStore, ReportError, ServerStore, open_store

NAMES = ["loss <b>&\"'", "Ωmega/ångström 中文", "a" * 250, "$x^2$_%", "with space"]


@pytest.fixture
def run_id(client: MlflowClient) -> str:
    return str(client.create_run("0", run_name="mine").info.run_id)


def test_what_a_job_has_left_is_all_there(store: str) -> None:
    record = collect_run(log_run(store, windows=10), store)
    assert record.run.status == "FINISHED"
    assert record.shares == SHARES
    assert record.last_step == 499
    assert record.attempts == [0, 1]
    assert [event.kind for event in record.events] == ["start", "start", "slow_rank", "warning"]
    assert [len(each.windows) for each in record.ranks] == [5, 5]
    assert record.network["nodes"][1]["host"] == "node-1"
    assert record.config.startswith("seed: 42")
    assert record.notes == []


def test_shares_of_attempts_that_differ_add_up_to_one_step(client: MlflowClient, store: str, run_id: str) -> None:
    """The first attempt was preempted and had waits in forward; the second one has ended, and had none."""
    first = {"forward_wait": 0.93, "forward": 0.02, "communication": 0.05}
    second = {"forward": 0.05, "communication": 0.95}
    windows = [(0, first), (10, first), (20, second), (30, second)]
    log_points(
        client,
        run_id,
        [(f"step/{part}_share", share, step, step) for step, parts in windows for part, share in parts.items()],
    )
    running = collect_run(run_id, store)
    assert sum(running.shares.values()) == pytest.approx(1)
    assert running.shares["forward_wait"] == pytest.approx(0.93 / 2)
    assert running.share_errors["forward_wait"] == pytest.approx(0.93 / 2 / math.sqrt(3))
    log_points(client, run_id, [(f"summary/step/{part}_share", share, 40, 40) for part, share in second.items()])
    assert collect_run(run_id, store).shares == second


def test_shares_that_do_not_add_up_are_none(client: MlflowClient, store: str, run_id: str) -> None:
    wrong = {"step/forward_wait_share": 0.95, "step/communication_share": 0.95, "throughput/data_wait_share": 0.03}
    log_points(client, run_id, [(name, share, 10, 10) for name, share in wrong.items()])
    record = collect_run(run_id, store)
    assert record.shares == {"data_wait": 0.03}
    assert record.share_errors == {}


@pytest.mark.parametrize(
    ("hosts", "device", "is_one"), [("aa", "cpu", True), ("ab", "cpu", False), ("aa", "cuda:0", False), ("", "", False)]
)
def test_a_page_accuses_no_network_where_all_ranks_share_a_machine(
    client: MlflowClient, store: str, run_id: str, hosts: str, device: str, is_one: bool
) -> None:
    ranks = [{"rank": rank, "host": host, "node": 0, "device": device} for rank, host in enumerate(hosts)]
    client.log_dict(run_id, {"ranks": ranks, "windows": []}, "ranks/attempt_0.json")
    assert facts_of(collect_run(run_id, store)).one_machine == is_one


def test_times_are_added_up_over_attempts(store: str) -> None:
    record = collect_run(log_run(store, windows=10), store)
    assert record.times["training"] == pytest.approx(2 * 5 * 50 * 0.42)
    assert record.times["startup"] == pytest.approx(2 * 62)
    assert record.times["redone"] == pytest.approx(20)


def test_a_database_and_mlflows_own_client_read_the_same(client: MlflowClient, store: str, run_id: str) -> None:
    points = [("a", float(step % 7), step, 10 * step) for step in range(50)] + [("b", math.nan, 3, 3), ("b", 1.0, 4, 4)]
    log_points(client, run_id, points)
    client.log_batch(run_id, tags=[RunTag("odd", "<&>")])
    mine, theirs = DatabaseStore(store), ServerStore(store)
    first, second = mine.run(run_id), theirs.run(run_id)
    assert vars(first) | {"metrics": None} == vars(second) | {"metrics": None}
    assert repr(sorted(first.metrics.items())) == repr(sorted(second.metrics.items()))
    read, again = mine.series(run_id, ["a", "b"], 60), theirs.series(run_id, ["a", "b"], 60)
    for name in ("a", "b"):
        assert {key: repr(value) for key, value in vars(read[name]).items()} == {
            key: repr(value) for key, value in vars(again[name]).items()
        }


@pytest.mark.parametrize("with_steps", [True, False])
def test_a_database_sums_many_points_up_with_their_extremes(
    client: MlflowClient, store: str, run_id: str, monkeypatch: pytest.MonkeyPatch, with_steps: bool
) -> None:
    monkeypatch.setattr(stores, "_MOST_POINTS", 1000)
    draw = random.Random(3)
    values = [draw.gauss(0, 1) for _ in range(5000)]
    values[1234], values[4321], values[77], values[99] = 50.0, -60.0, math.nan, math.inf
    points = [("m", value, at if with_steps else 0, 1000 + at) for at, value in enumerate(values)]
    log_points(client, run_id, points)
    series = DatabaseStore(store).series(run_id, ["m"], 60)["m"]
    finite = [value for value in values if math.isfinite(value)]
    assert len(series.means) <= 400
    assert series.points == len(finite)
    assert (series.highs.max(), series.lows.min()) == (50.0, -60.0)
    assert (series.missing, series.first_missing) == (2, 77 if with_steps else 0)
    assert float((series.means * series.counts).sum()) == pytest.approx(sum(finite))


def test_a_strangers_run_with_odd_names_and_values(client: MlflowClient, store: str, run_id: str) -> None:
    names = [name for name in NAMES if "<" not in name and "$" not in name]  # what MLflow takes
    log_points(client, run_id, [(name, value, 0, 5) for name in names for value in (math.nan, 1e308, -1e308)])
    client.log_param(run_id, "api_key", "wJalrXUtnFEMI0815")
    record = collect_run(run_id, store)
    assert set(record.series) == set(names)
    assert all(each.points == 2 and each.missing == 1 for each in record.series.values())
    assert record.shares == {}
    assert "wJalr" not in record.run.params["api_key"]


def test_an_empty_run(store: str, run_id: str) -> None:
    record = collect_run(run_id, store)
    assert (record.last_step, record.ended_ms, record.series, record.events) == (None, None, {}, [])


WHOLE = '{"kind": "crash", "text": "no", "step": 3, "time_ms": 5}'
HALF = '{"kind": "warn'
WINDOW = '{"step": 1, "compute_s": [1.0]}'
# What cannot be read of a file, and what is said of it.
BROKEN: dict[str, tuple[str, str, str | None]] = {
    "half a line": ("events/attempt_0.jsonl", f"{WHOLE}\n{HALF}", "1 of 2 lines cannot be read and are left out."),
    "a newer kind": ("events/attempt_1.jsonl", WHOLE.replace("crash", "new"), "1 of 1 lines cannot be read"),
    "no step": ("events/attempt_0.jsonl", '{"kind": "crash", "text": "no"}\n[]\n7', "3 of 3 lines cannot be read"),
    "whole lines": ("events/attempt_0.jsonl", f"{WHOLE}\n{WHOLE}\n", None),
    "half a table": ("ranks/attempt_0.json", '{"ranks": [', "is no table of ranks, or was cut off: it is left out."),
    "no windows": ("ranks/attempt_2.json", '{"ranks": []}', "is no table of ranks"),
    "odd ranks": ("ranks/attempt_0.json", '{"ranks": [{"rank": 0}, 7], "windows": []}', "1 of 2 ranks cannot be read"),
    "odd windows": (
        "ranks/attempt_0.json",
        f'{{"ranks": [{{}}], "windows": [{WINDOW}, 3, {{"step": 2, "compute_s": ["x"]}}]}}',
        "2 of 3 windows, or their seconds, cannot be read and are left out.",
    ),
    "a table": ("ranks/attempt_0.json", f'{{"ranks": [{{}}], "windows": [{WINDOW}]}}', None),
    "a list": ("network.json", "[]", "network.json names no nodes, or was cut off: it is left out."),
    "half a network": ("network.json", '{"nodes": [{"host"', "network.json names no nodes, or was cut off"),
    "odd nodes": ("network.json", '{"nodes": [{"host": "a"}, 3]}', "1 of 2 nodes cannot be read"),
    "a network": ("network.json", '{"nodes": [{"host": "a"}]}', None),
    "a flood": ("config.yaml", "x" * 3_000, "config.yaml has 0 MiB, and more than 0 are not read."),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_counted_and_the_rest_is_shown(
    client: MlflowClient, store: str, run_id: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(profiles, "_LARGEST", 2_000)
    file, text, words = BROKEN[name]
    client.log_text(run_id, text, file)
    record = collect_run(run_id, store)
    assert len(record.notes) == (words is not None), record.notes
    assert words is None or (words in record.notes[0] and file in record.notes[0]), record.notes
    assert len(record.events) == text.count(WHOLE)
    assert sum(len(window["compute_s"]) for each in record.ranks for window in each.windows) == text.count(WINDOW)


def test_waits_that_are_no_list_leave_the_verdict(client: MlflowClient, store: str, run_id: str) -> None:
    window = {"step": 1, "compute_s": [1.0, 2.0], "data_wait_s": 5, "slow": {"1": "compute"}}
    content = {"ranks": [{"rank": 0}, {"rank": 1}], "windows": [window, window]}
    client.log_dict(run_id, content, "ranks/attempt_0.json")
    assert verdict_of(collect_run(run_id, store)).headline


def test_attempts_that_are_too_many_are_counted(client: MlflowClient, store: str, run_id: str) -> None:
    for number in range(22):
        client.log_text(run_id, WHOLE, f"events/attempt_{number}.jsonl")
    record = collect_run(run_id, store)
    assert len(record.events) == 20
    assert record.notes == ["events has files of 22 attempts; the newest 20 are read."]


def test_time_that_is_up_leaves_metrics_out_and_says_so(client: MlflowClient, store: str, run_id: str) -> None:
    log_points(client, run_id, [("loss", 1.0, 0, 0)])
    record = collect_run(run_id, store, read_s=-1.0)
    assert record.series == {}
    assert record.notes == ["Not read, as the time for reading was up: loss."]
    slow = collect_run(run_id, store, read_s=-1.0, store=ServerStore(store))
    assert slow.notes == record.notes


def test_ours_come_first_and_a_flood_of_metrics_is_cut() -> None:
    wanted, others = choose_metrics(
        ["zz", *(f"m{number}" for number in range(100)), "val/loss", "step/other_share", "summary/x", "system/cpu"]
    )
    assert wanted[:2] == ["step/other_share", "val/loss"]
    assert "summary/x" not in wanted
    assert wanted[-1] == "system/cpu"
    assert others == 102 - 16


def test_a_run_or_a_store_that_is_not_there(store: str, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="has no run nobodys"):
        collect_run("nobodys", store)
    with pytest.raises(ReportError, match="has no run nobodys"):
        collect_run("nobodys", store, store=ServerStore(store))
    with pytest.raises(ReportError, match="There is no store"):
        open_store(f"sqlite:///{tmp_path}/none.db")
    assert not (tmp_path / "none.db").exists()
    (tmp_path / "other.db").write_bytes(b"")
    with pytest.raises(ReportError, match="does not answer"):
        collect_run("any", f"sqlite:///{tmp_path}/other.db")
    with pytest.raises(ReportError, match=r"does not answer: .*Check its address"):
        collect_run("any", "http://127.0.0.1:9")
