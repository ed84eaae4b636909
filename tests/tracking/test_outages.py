"""A real MLflow server behind a proxy that plays one in trouble: each point stands, once."""

from __future__ import annotations

import itertools
import json
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from tests.faults.tracking import Proxy, Trouble
from tests.tracking.server import Server

from azureml_strategy.tracking import JobMLFlowLogger, writer
from azureml_strategy.tracking.offline_queue import find_offline_queues

_WRITE = "/runs/log-batch"


class Faulty(Proxy):
    """In front of a server: what `fault` says of a request comes instead of it. Counts what the server was given."""

    def __init__(self, server: str) -> None:
        super().__init__(server, Trouble("", 0, 0))
        self.fault: Callable[[str, dict[str, Any]], str] = lambda path, body: ""
        self.written: Counter[tuple[str, int]] = Counter()
        self.refused = 0

    def trouble(self, path: str, body: bytes) -> str:
        content = json.loads(body or b"{}")
        kind = self.fault(path, content)
        if path.endswith(_WRITE) and kind in ("", "answer lost"):
            self.written.update((each["key"], int(each["step"])) for each in content.get("metrics", []))
        self.refused += kind == "refuses"
        return kind


@pytest.fixture
def faulty(server: Server) -> Iterator[Faulty]:
    proxy = Faulty(server.uri)
    yield proxy
    proxy.close()


def _steps(client: MlflowClient, run_id: str | None, name: str) -> list[int]:
    return sorted(metric.step for metric in client.get_metric_history(run_id, name))


def _wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _log(logger: JobMLFlowLogger, steps: range) -> None:
    for step in steps:
        logger.log_metrics({"loss": step / 2, "top1": math.nan if step % 7 == 0 else 0.5}, step)


@pytest.mark.filterwarnings("ignore:MLflow is away")
def test_trouble_of_a_server_loses_no_point_and_doubles_none(
    faulty: Faulty, client: MlflowClient, make_logger: Callable[..., JobMLFlowLogger], tmp_path: Path
) -> None:
    """Several in a row, each with a run of its own, on one server."""
    for case in (_refuses_all_for_three_seconds, _asks_for_ten_minutes, _loses_answers, _refuses_one_metric):
        faulty.fault = lambda path, body: ""
        faulty.written.clear()
        logger = make_logger(tracking_uri=faulty.url, run_name=case.__name__, flush_interval_s=0.05, folder=tmp_path)
        _log(logger, range(500))
        assert logger.flush()
        case(faulty, logger)
        logger.finalize()
        assert client.get_run(logger.run_id).info.status == "FINISHED", case
        for name in ("loss", "top1"):
            assert _steps(client, logger.run_id, name) == list(range(1500)), case
        checks = [point for point, times in faulty.written.items() if times > 1]
        assert len(checks) <= 4, "points sent twice: only ones that showed whether the store takes anything"
        assert find_offline_queues(tmp_path) == []


def _refuses_all_for_three_seconds(faulty: Faulty, logger: JobMLFlowLogger) -> None:
    over = time.monotonic() + 3
    faulty.fault = lambda path, body: _refused(faulty, path, over)
    _log(logger, range(500, 1500))
    _wait(lambda: faulty.refused and time.monotonic() > over)
    assert 0 < faulty.refused < 200, "a store that refuses everything is not asked about each point"


def _refused(faulty: Faulty, path: str, over: float) -> str:
    return "refuses" if path.endswith(_WRITE) and (time.monotonic() < over or not faulty.refused) else ""


def _asks_for_ten_minutes(faulty: Faulty, logger: JobMLFlowLogger) -> None:
    asked = threading.Event()

    def once(path: str, body: dict[str, Any]) -> str:
        if not path.endswith(_WRITE) or asked.is_set():
            return ""
        asked.set()
        return "429"

    faulty.retry_after = "600"
    faulty.fault = once
    _log(logger, range(500, 1500))
    assert asked.wait(60)


def _loses_answers(faulty: Faulty, logger: JobMLFlowLogger) -> None:
    """Of every other batch; a NaN that stands already makes MLflow's SQL store fail if it comes again."""
    count = itertools.count()
    faulty.fault = lambda path, body: "answer lost" if path.endswith(_WRITE) and next(count) % 2 == 0 else ""
    _log(logger, range(500, 1500))
    _wait(lambda: next(count) > 6)
    faulty.fault = lambda path, body: ""


def _refuses_one_metric(faulty: Faulty, logger: JobMLFlowLogger) -> None:
    """For less time than it takes to believe it."""
    over = time.monotonic() + 2

    def fault(path: str, body: dict[str, Any]) -> str:
        refuses = any(each["key"] == "top1" for each in body.get("metrics", ())) and time.monotonic() < over
        return "refuses" if path.endswith(_WRITE) and refuses else ""

    faulty.fault = fault
    _log(logger, range(500, 520))
    _wait(lambda: time.monotonic() > over)
    _log(logger, range(520, 1500))


def _in_turns() -> Callable[[], bool]:
    """Every other one, as behind an address of two servers of which one is broken."""
    return itertools.cycle((False, True)).__next__


def _at_random() -> Callable[[], bool]:
    generator = random.Random(3)
    return lambda: generator.random() < 0.5


_KINDS = ("500", "503", "refuses")


@pytest.mark.parametrize("cases", ["one of each kind", pytest.param("all", marks=pytest.mark.exhaustive)])
@pytest.mark.filterwarnings("ignore:MLflow is away")
def test_a_store_that_fails_every_other_request_at_the_end_has_all_of_it(
    faulty: Faulty, client: MlflowClient, make_logger: Callable[..., JobMLFlowLogger], tmp_path: Path, cases: str
) -> None:
    of_each = zip(_KINDS, itertools.cycle((_in_turns, _at_random)))
    for kind, chosen in itertools.product(_KINDS, (_in_turns, _at_random)) if cases == "all" else of_each:
        faulty.fault = lambda path, body: ""
        logger = make_logger(tracking_uri=faulty.url, run_name=kind, flush_interval_s=0.05, folder=tmp_path)
        _log(logger, range(500))
        assert logger.flush()
        fails = chosen()
        faulty.fault = lambda path, body, kind=kind, fails=fails: kind if fails() else ""  # type: ignore[misc]
        _log(logger, range(500, 1500))
        logger.finalize()
        faulty.fault = lambda path, body: ""
        assert client.get_run(logger.run_id).info.status == "FINISHED", (kind, chosen)
        for name in ("loss", "top1"):
            assert _steps(client, logger.run_id, name) == list(range(1500)), (kind, chosen)
        assert find_offline_queues(tmp_path) == []


def test_what_a_store_has_not_taken_at_the_end_is_counted(
    faulty: Faulty, make_logger: Callable[..., JobMLFlowLogger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_PATIENCE_S", 0.5)
    logger = make_logger(tracking_uri=faulty.url, flush_interval_s=0.05, folder=tmp_path)
    _log(logger, range(10))
    assert logger.flush()
    faulty.fault = lambda path, body: "503"
    _log(logger, range(10, 150))
    with pytest.warns(UserWarning, match="MLflow") as warned:
        logger.finalize()
    told = [str(each.message) for each in warned if "did not take everything in time" in str(each.message)]
    assert any(
        "280 points of metrics" in each and str(find_offline_queues(tmp_path)[0].path) in each for each in told
    ), told
    faulty.fault = lambda path, body: ""
