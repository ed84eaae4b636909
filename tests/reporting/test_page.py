"""The page of a run as a file: what it says, what it must not hold, and how a browser shows it."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from PIL import Image
from tests.reporting.example import log_points, log_run

from azureml_strategy.reporting.collect import RunRecord, collect_run
from azureml_strategy.reporting.comparison import compare_page
from azureml_strategy.reporting.page import Page, Section, Table, render
from azureml_strategy.reporting.run_page import run_page
from azureml_strategy.reporting.series import reduce_points
from azureml_strategy.reporting.stores import StoredRun

CHARTS = ["A step, and the whole run", "The parts of a step, over the run", "Time of a step", "images per second"]
CHARTS += ["loss", "val/top1", "Computing time of each rank", "gpu utilization percentage"]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Reader(HTMLParser):
    """What a browser would fetch or run, the charts, and the tags that are open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.scripts = 0
        self.charts: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.scripts += tag == "script" or any(name.startswith("on") for name in given)
        addresses = [given[name] for name in ("src", "href", "xlink:href", "data", "action") if name in given]
        self.fetched += [each for each in addresses if not each.startswith(("#", "data:"))]
        self.fetched += [tag] if tag in ("link", "iframe", "object", "embed", "base") else []
        self.ids += [given["id"]] if "id" in given else []
        if tag == "svg":
            self.charts.append(given["aria-label"])

    handle_startendtag = handle_starttag


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    store = f"sqlite:///{folder}/mlflow.db"
    text = render(run_page(collect_run(log_run(store, windows=24), store)))
    (folder / "report.html").write_text(text, encoding="utf-8")
    return folder / "report.html"


def test_it_opens_with_what_the_run_waits_for_and_what_that_costs(page: Path) -> None:
    text = page.read_text()
    place = [
        text.index(each)
        for each in (
            "This run waits most for data: 34% of each step.",
            "with 4 workers a rank",
            "At most ",
            "What to do next",
            "Feed the device faster",
            "Replace the slow node",
            "Where the time goes",
        )
    ]
    assert place == sorted(place)
    assert re.search(r"At most \d\d% faster, \d\.\d\d USD less for this run", text)
    for shown in (
        "rank 5 (node-1, cuda:1)",
        "This size has no InfiniBand.",
        "9f1c2e7a4b6d",
        "seed: 42",
        "symbol errors",
    ):
        assert shown in text


def test_it_fetches_nothing_runs_nothing_and_is_small(page: Path) -> None:
    read = Reader(page.read_text())
    assert read.fetched == []
    assert read.scripts == 0
    assert set(CHARTS) <= set(read.charts)
    assert len(read.ids) == len(set(read.ids))
    styles = re.findall(r"url\(([^)]*)\)|@import", page.read_text())
    assert all(each.startswith("#") for each in styles)
    assert page.stat().st_size < 2**20


def test_texts_of_users_are_escaped_everywhere(client: MlflowClient, store: str) -> None:
    nasty = "<script>alert(1)</script>\"'&\x07"
    run_id = client.create_run("0", run_name=nasty).info.run_id
    log_points(client, run_id, [("val/loss", 1.0 / step, step, step) for step in range(1, 9)])
    client.log_param(run_id, "model/_target_", nasty)
    for tag in ("azureml_strategy.recipe", "mlflow.user", "throughput.unit"):
        client.set_tag(run_id, tag, nasty)
    record = collect_run(run_id, store)
    for text in (render(run_page(record)), render(compare_page([record, record]))):
        assert Reader(text).scripts == 0
        assert "<script" not in text
        assert "\x07" not in text
        assert "&lt;script&gt;" in text


def test_the_largest_run_stays_below_a_megabyte(client: MlflowClient, store: str) -> None:
    run_id = client.create_run("0").info.run_id
    names = [*(f"own/metric_{number}" for number in range(40)), *(f"val/metric_{number}" for number in range(40))]
    names += [f"system/node-{number // 8}/gpu_{number % 8}_power_usage_watts" for number in range(50)]
    log_points(client, run_id, [(name, 0.0, 0, 0) for name in names])
    noise = np.random.default_rng(0).normal(size=(len(names), 901))
    rows = [
        (name, value, 1000 * step, step, run_id)
        for name, values in zip(names, noise, strict=True)
        for step, value in enumerate(values.tolist())
        if step
    ]
    with sqlite3.connect(store.removeprefix("sqlite:///")) as database:
        columns = "key, value, timestamp, step, run_uuid, is_nan"
        database.executemany(f"INSERT INTO metrics ({columns}) VALUES (?, ?, ?, ?, ?, 0)", rows)
    windows = [{"step": step, "compute_s": [1 + abs(noise[0, step])] * 256, "slow": {}} for step in range(500)]
    client.log_dict(run_id, {"ranks": [], "windows": windows}, "ranks/attempt_0.json")
    client.log_text(run_id, "key: value\n" * 5000, "config.yaml")
    text = render(run_page(collect_run(run_id, store)))
    assert "Computing time of each rank" in Reader(text).charts
    assert len(text.encode()) < 2**20


def test_a_strangers_run_and_an_empty_one_have_a_page(client: MlflowClient, store: str) -> None:
    run_id = client.create_run("0").info.run_id
    empty = render(run_page(collect_run(run_id, store)))
    assert "This run did not measure where its time goes." in empty
    log_points(client, run_id, [("train_loss", float("nan"), 3, 5), ("train_loss", 1.0, 1, 4)])
    stranger = render(run_page(collect_run(run_id, store)))
    assert Reader(stranger).charts == ["train_loss"]
    assert "1 values are NaN or infinite, the first at step 3." in stranger
    assert "Find out why the loss is no number" in stranger


def test_a_run_that_failed_says_where(client: MlflowClient, store: str) -> None:
    run_id = client.create_run("0").info.run_id
    log_points(client, run_id, [("train_loss", 1.0, 41, 5)])
    client.set_terminated(run_id, "FAILED")
    assert "This run ended after step 41; it left no word" in render(run_page(collect_run(run_id, store)))
    event = '{"kind": "crash", "text": "ValueError: <b>no</b>", "step": 42, "time_ms": 1700000000000}\n'
    client.log_text(run_id, event, "events/attempt_0.jsonl")
    text = render(run_page(collect_run(run_id, store)))
    assert "An exception ended this run at step 42, on 2023-11-14 22:13 UTC." in text
    assert "ValueError: &lt;b&gt;no&lt;/b&gt;" in text
    assert text.index("An exception ended") < text.index("Find what raised the exception")


def test_runs_beside_one_another(store: str) -> None:
    records = [collect_run(log_run(store, name, windows=windows), store) for name, windows in (("a", 4), ("b", 6))]
    text = render(compare_page(records))
    assert {"train/loss", "A step"} <= set(Reader(text).charts)
    assert "4,700" in text


def _with_metrics(name: str, own: int) -> RunRecord:
    texts = dict.fromkeys(("run_id", "name", "experiment", "experiment_id", "status", "artifact_uri"), name)
    run = StoredRun(**texts, started_ms=0, ended_ms=1, tags={}, params={}, metrics={})
    point = reduce_points(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1))
    return RunRecord(run=run, store="", open_with="", series={f"val/{each:02}": point for each in range(own)})


@pytest.mark.parametrize("runs", [2, 8, 9, 12])
@pytest.mark.parametrize("own", [3, 8, 9, 17])
def test_what_a_comparison_leaves_out_is_named(runs: int, own: int) -> None:
    notes = "\n".join(compare_page([_with_metrics(f"r{number}", own) for number in range(runs)]).notes)
    assert (f"Charts show 8 of {runs} runs, and not r8" in notes) == (runs > 8)
    assert (f"8 of {own} metrics have figures, and not val/08" in notes) == (own > 8)
    assert (f"16 of {own} metrics have charts, and not val/16." in notes) == (own > 16)


def test_sections_without_content_are_left_out() -> None:
    sections = [Section("Nothing", tables=[Table([])]), Section("Something", tables=[Table([("a", "`b`")])])]
    text = render(Page(title="t", kicker="k", headline="A `code` and one ` alone", sections=sections))
    assert "Nothing" not in text
    assert "Something" in text
    assert "A `code` and one ` alone" in text


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 500)])
def test_a_browser_shows_it_without_a_network(page: Path, tmp_path: Path, scheme: str, width: int) -> None:
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path}/profile",
    ]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size={width},3000"]
    options += ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    picture = tmp_path / "page.png"
    shown = subprocess.run(
        [str(CHROMIUM), *options, f"--screenshot={picture}", page.as_uri()],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert picture.exists(), shown.stderr
    pixels = np.asarray(Image.open(picture).convert("L"), float)
    assert pixels.shape == (3000, width)
    assert (pixels[:40, :10].mean() > 200) == (scheme == "light")
    # Nothing is wider than the page, and there is something on each part of it.
    assert pixels[:, -8:].std() < 3
    assert all(part.std() > 5 for part in np.array_split(pixels, 6))
