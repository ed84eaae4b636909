"""The flight recorder of a real process group."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.preloaded import run_forked
from torch.distributed.flight_recorder import fr_trace

from azureml_strategy.hang_detection import flight_recorder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a process that has recorded, and what it says at the end."""
    folder = tmp_path_factory.mktemp("recorded")
    done = run_forked([str(Path(__file__).with_name("recorded.py")), str(folder)], os.environ, timeout=100)
    assert done.returncode == 0, done.stdout
    return folder, done.stdout.splitlines()[-1]


def test_collectives_of_each_group(recorded: tuple[Path, str]) -> None:
    said = json.loads(recorded[1])
    found = {each["operation"]: each for each in said["shown"]}
    assert found.keys() == {"all_reduce", "broadcast"}, said
    assert found["all_reduce"]["text"] == f"all_reduce #{found['all_reduce']['number']} of 4.0 KB"
    assert found["all_reduce"]["over"]
    assert found["all_reduce"]["ranks"] == [0]
    assert found["broadcast"]["size_bytes"] == 20
    assert len([name for name in said["names"] if name.endswith("all_reduce")]) == 3, said


def test_the_trace_is_what_torchs_analyser_reads(recorded: tuple[Path, str]) -> None:
    fr_trace.main([str(recorded[0] / "traces")])


def test_no_recorder_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(flight_recorder.c10d, "_dump_fr_trace")
    assert flight_recorder.record(True, 0) is None
    assert flight_recorder.counts() == {}
