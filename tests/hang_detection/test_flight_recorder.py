"""The flight recorder of a real process group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from azureml_strategy.hang_detection import flight_recorder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a process that has recorded, and what it says."""
    folder = tmp_path_factory.mktemp("recorded")
    command = [sys.executable, str(Path(__file__).with_name("recorded.py")), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


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
    program = "from torch.distributed.flight_recorder.fr_trace import main; main()"
    read = [sys.executable, "-c", program, str(recorded[0] / "traces")]
    done = subprocess.run(read, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_recorder_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(flight_recorder.c10d, "_dump_fr_trace")
    assert flight_recorder.record(True, 0) is None
    assert flight_recorder.counts() == {}
