"""The flight recorder of a real process group."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
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


def test_collectives_of_each_group(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(10))  # of another group of this name, as far as one can tell
    since, second = time.time(), dist.new_group([0])
    for _ in range(3):
        dist.all_reduce(torch.ones(1000))
    dist.broadcast(torch.ones(10, dtype=torch.bfloat16), 0, group=second)
    trace = _when_over(since)
    found = {each.operation: each for each in recorder.collectives(trace)}
    assert str(found["all_reduce"]) == f"all_reduce #{found['all_reduce'].number} of 4.0 KB"
    assert found["all_reduce"].over
    assert found["all_reduce"].ranks == (0,)
    assert found["broadcast"].size_bytes == 20
    assert len([each for each in trace["entries"] if each["profiling_name"].endswith("all_reduce")]) == 3


def _when_over(since: float) -> recorder.Trace:
    """The trace once all is over in it: gloo says so in a thread of its own, after the call has returned."""
    deadline = time.monotonic() + 60
    while True:
        trace = recorder.record(False, since)
        assert trace is not None
        if all(each.over for each in recorder.collectives(trace)) or time.monotonic() > deadline:
            return trace
        time.sleep(0.01)


def test_the_trace_is_what_torchs_analyser_reads(group: dist.ProcessGroup, tmp_path: Path) -> None:
    dist.all_reduce(torch.ones(1000))
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces/rank_0").write_bytes(pickle.dumps(recorder.record(False, 0)))
    program = "from torch.distributed.flight_recorder.fr_trace import main; main()"
    read = [sys.executable, "-c", program, str(tmp_path / "traces")]
    done = subprocess.run(read, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_recorder_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(recorder.c10d, "_dump_fr_trace")
    assert recorder.record(True, 0) is None
    assert recorder.counts() == {}
