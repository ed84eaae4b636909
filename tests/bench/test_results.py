"""What is kept, and that a file is complete or not there."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.bench.conftest import MakePairs, row

from azureml_strategy.bench.options import BenchError
from azureml_strategy.bench.page import bench_page
from azureml_strategy.bench.results import Results, Sweep, read_results
from azureml_strategy.files import write_atomically


def test_a_sweep(sweep: Results) -> None:
    written = json.loads(sweep.to_json())
    assert [each["collective"] for each in written["collectives"]] == ["all-reduce", "all-reduce", "broadcast"]
    assert written["collectives"][1]["bus_bandwidth"] == 0.12
    assert written["unavailable"] == {"all-to-all": "Backend gloo does not support alltoall_base"}
    assert (written["verdict"]["word"], written["verdict"]["expectation"]["bandwidth"]) == ("as expected", 0.125)
    assert written["conditions"]["backend"] == written["network"]["backend"] == "gloo"
    assert "pairs" not in written
    assert not sweep.sound, "broadcast is wrong"


def test_the_largest_size_of_a_collective() -> None:
    measured = Sweep([row("all-reduce", 10, 1), row("all-reduce", 20, 2), row("broadcast", 30, 3)])
    assert measured.largest("all-reduce") == row("all-reduce", 20, 2)
    assert measured.largest("all-gather") is None
    assert measured.wrong == []


def test_pairs(pairs: MakePairs) -> None:
    written = json.loads(pairs({(0, 1): 1.0, (0, 2): 0.5, (1, 2): 0.5}, (0, 1)).to_json())["pairs"]
    assert written["bandwidths"][0] == {"nodes": [0, 1], "bus_bandwidth": 1.0, "wrong": True}
    assert written["bandwidths"][1] == {"nodes": [0, 2], "bus_bandwidth": 0.5, "wrong": False}
    assert written["diagnosis"]["slow_nodes"] == [2]


def test_soundness_of_pairs(pairs: MakePairs) -> None:
    assert pairs({(0, 1): 1.0, (0, 2): 1.0, (1, 2): 1.0}).sound
    assert not pairs({(0, 1): 1.0, (0, 2): 1.0, (1, 2): 1.0}, (0, 1)).sound
    assert not pairs({(0, 1): 1.0, (0, 2): 1.0, (1, 2): 0.5}).sound
    assert not pairs({(0, 1): 1.0}, expected=2.0).sound


WHOLE = Sweep(
    [row(name, size, 1.0) for name in ("all-reduce", "broadcast") for size in (64, 128)], {"all-to-all": "no"}
)


def _content(pairs: MakePairs, kind: str) -> tuple[dict[str, Any], list[Any]]:
    """The content of a file, and its list of measurements."""
    results = pairs({(0, 1): 1.0, (0, 2): 1.0, (1, 2): 1.0})
    results = results if kind == "pairs" else replace(results, measured=WHOLE)
    content = json.loads(results.to_json())
    return content, content["pairs"]["bandwidths"] if kind == "pairs" else content["collectives"]


@pytest.mark.parametrize(("kind", "place"), [("pairs", 0), ("pairs", 2), ("sweep", 0), ("sweep", 3)])
@pytest.mark.parametrize("bandwidth", [None, math.nan, math.inf])
def test_a_file_that_lacks_a_measurement_is_refused(
    pairs: MakePairs, kind: str, place: int, bandwidth: float | None
) -> None:
    content, measurements = _content(pairs, kind)
    read_results(content)
    if bandwidth is None:
        del measurements[place]
    else:
        measurements[place]["bus_bandwidth"] = bandwidth
    with pytest.raises(BenchError, match=r"lacks .*, and 1 measurement\(s\) in all"):
        read_results(content)


def test_a_page_names_collectives_that_were_not_measured(pairs: MakePairs) -> None:
    assert "not available: no" in str(bench_page(_content(pairs, "sweep")[0]).sections)


def test_files_are_complete_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "bench.json"
    write_atomically(path, b"first")
    write_atomically(path, b"second")
    assert path.read_bytes() == b"second"
    assert list(path.parent.iterdir()) == [path]


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
