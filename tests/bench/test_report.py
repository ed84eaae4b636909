from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.bench.conftest import MakePairs

from azureml_strategy.bench.report import plot, print_results
from azureml_strategy.bench.results import Results, Sweep


def pixels(results: Results) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(plot(results))).convert("RGB"))


def test_a_line_for_each_collective_and_the_expectation(sweep: Results) -> None:
    whole = pixels(sweep)
    assert whole.shape == (600, 960, 3)
    assert isinstance(sweep.measured, Sweep)
    alone = replace(sweep, measured=Sweep(sweep.measured.measurements[:2]))
    assert not np.array_equal(pixels(alone), whole)
    assert not np.array_equal(pixels(replace(sweep, verdict=None)), whole)


def test_nothing_that_could_be_measured(sweep: Results) -> None:
    assert pixels(replace(sweep, measured=Sweep([], {"all-reduce": "no"}), verdict=None)).shape == (600, 960, 3)


def test_pairs_are_squares(pairs: MakePairs) -> None:
    even = pixels(pairs({(0, 1): 1.0, (0, 2): 1.0, (1, 2): 1.0}))
    assert not np.array_equal(even, pixels(pairs({(0, 1): 1.0, (0, 2): 1.0, (1, 2): 0.5})))


def printed(results: Results, capsys: pytest.CaptureFixture[str]) -> str:
    print_results(results, [Path("a.json"), Path("b.png")])
    return capsys.readouterr().out


def test_a_sweep(sweep: Results, capsys: pytest.CaptureFixture[str]) -> None:
    output = printed(sweep, capsys)
    assert output.isascii()
    table = [line.strip("|").split("|") for line in output.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line] for line in table]
    assert cells[1] == ["all-reduce", "1 MiB", "10.486", "10.486", "0.1000", "0.1000", "right"]
    assert cells[2][:2] == ["all-reduce", "64 MB"]
    assert cells[3][-1] == "WRONG"
    assert cells[4] == ["all-to-all", "", "", "", "", "", "not available on gloo"]
    assert "all-to-all is not available: Backend gloo does not support alltoall_base" in output
    assert "WRONG: broadcast at 64 MB: 3 of 100 elements that were compared differ" in output
    assert "Network: gloo over sockets on eth0" in output
    assert "Verdict: all-reduce reached 0.12 GB/s: as expected (96% of 0.125 GB/s, as --expect says)" in output
    assert output.endswith("Written: a.json, b.png\n")


def test_slow_nodes_and_links_by_name(pairs: MakePairs, capsys: pytest.CaptureFixture[str]) -> None:
    bandwidths = dict.fromkeys([(0, 1), (0, 2), (1, 2)], 20.0) | dict.fromkeys([(0, 3), (1, 3), (2, 3)], 5.0)
    output = printed(pairs(bandwidths, (0, 1)), capsys)
    assert "Slow node: 3 (host-3): all its pairs are below 16 GB/s, 80 % of the usual 20." in output
    assert "WRONG: all-reduce between node 0 (host-0) and node 1 (host-1)." in output
    assert "| 0 - 1 |     20.0 |  WRONG |" in output
    assert "| 0 - 2 |     20.0 |  right |" in output
    assert "| 2 - 3 |   5.0000 |   slow |" in output
    output = printed(pairs(bandwidths | dict.fromkeys([(1, 3), (2, 3)], 20.0)), capsys)
    assert "Slow link: node 0 (host-0) - node 3 (host-3): below 16 GB/s" in output


def test_no_fault(pairs: MakePairs, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No node and no link is slow: no pair is below 16 GB/s" in printed(
        pairs(dict.fromkeys([(0, 1), (0, 2), (1, 2)], 20.0)), capsys
    )
    assert "Two nodes have nothing to be compared with" in printed(pairs({(0, 1): 1.0}), capsys)


def test_of_many_pairs_only_the_slow_ones(pairs: MakePairs, capsys: pytest.CaptureFixture[str]) -> None:
    bandwidths = {(first, second): 20.0 for first in range(20) for second in range(first + 1, 20)}
    output = printed(pairs(bandwidths | {(3, 7): 5.0}), capsys)
    assert [line.split("|")[1].strip() for line in output.splitlines() if " - " in line and "|" in line] == ["3 - 7"]
