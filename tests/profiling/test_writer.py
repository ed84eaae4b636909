"""What a rank sends to the run of rank 0, which may end before it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from azureml_strategy.control.channel import StoreLostError
from azureml_strategy.profiling.request import Details, Profile
from azureml_strategy.profiling.writer import ProfileWriter, Uploader

PLAN = Profile(3, 4, (0, 1), Details(False, False, False))


class StoreOfRank0:
    """Rank 0 shares its run at the third look, and ends when the trace is written."""

    def __init__(self) -> None:
        self.looks = 0
        self.has_ended = False

    def get(self, key: str) -> str | None:
        if self.has_ended:
            raise StoreLostError(silent=False)
        self.looks += 1
        return json.dumps(["its run", "sqlite:///here.db", socket.gethostname()]) if self.looks > 2 else None

    def pause(self, seconds: float) -> bool:
        return False


def written_by_rank_1(store: StoreOfRank0) -> tuple[Any, str]:
    """Write a profile; return its logger and what is said of it."""

    def write(path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"traceEvents": []}))
        store.has_ended = True

    logger = Mock(run_and_store=Mock(return_value=(None, "sqlite:///here.db")))
    writer = ProfileWriter(Path.cwd(), 1, Uploader(Mock(loggers=[logger], global_rank=1), store))  # type: ignore[arg-type]
    said: list[str] = []
    writer.write(Mock(write=write), PLAN, said.append)
    assert writer.wait(60.0)
    return logger, said[0]


def test_a_rank_keeps_its_files_though_rank_0_ends_meanwhile() -> None:
    logger, said = written_by_rank_1(StoreOfRank0())
    assert {call.args[0] for call in logger.send_file.call_args_list} == {"its run"}, said
    assert any(call.args[1].name.startswith("trace_rank_1_steps_3-4.json") for call in logger.send_file.call_args_list)
    assert "stays there" not in said


def test_a_rank_that_is_told_of_no_run_says_so(caplog: pytest.LogCaptureFixture) -> None:
    store = StoreOfRank0()
    store.has_ended = True
    logger, said = written_by_rank_1(store)
    assert "It stays there, as rank 0 has not told this rank the MLflow run." in said
    assert Path("profile/trace_rank_1_steps_3-4.json").exists() or list(Path("profile").glob("*.gz"))
    logger.send_file.assert_not_called()
