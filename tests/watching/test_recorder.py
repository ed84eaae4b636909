"""The flight recorder of a real process group."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from azureml_strategy.watching import recorder


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_collectives_of_each_group(tmp_path: Path) -> None:
    program = [sys.executable, str(Path(__file__).with_name("recorded.py")), str(tmp_path / "store")]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_trace_is_what_torchs_analyser_reads(group: dist.ProcessGroup, tmp_path: Path) -> None:
    dist.all_reduce(torch.ones(1000))
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces/rank_0").write_bytes(pickle.dumps(recorder.record(stacks=False)))
    program = "from torch.distributed.flight_recorder.fr_trace import main; main()"
    read = [sys.executable, "-c", program, str(tmp_path / "traces")]
    done = subprocess.run(read, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_recorder_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(recorder.c10d, "_dump_fr_trace")
    assert recorder.record(stacks=True) is None
    assert recorder.counts() == {}
