"""The benchmark between real processes: right and wrong results, and a slow node among isolated ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.emulator.test_nodes import why_not
from tests.multiprocess.conftest import RunJob

from azureml_strategy.emulator import EmulatedJob, emulate

# Of three ranks; nccl-tests, doc/PERFORMANCE.md.
BUS_FACTORS = {
    "all-reduce": 4 / 3,
    "all-gather": 2 / 3,
    "reduce-scatter": 2 / 3,
    "broadcast": 1,
    "all-to-all": 2 / 3,
    "send-receive": 1,
}
# Of a message of 300 elements, what a rank of three has to compare.
RECEIVED = dict.fromkeys(BUS_FACTORS, 300) | {"reduce-scatter": 100}


def test_collectives_between_three_ranks(run_job: RunJob) -> None:
    job = run_job("collectives.py", nodes=3)
    assert job.exit_code == 0, job.output
    for rank in range(3):
        result = job.results[rank]
        assert result["right"] == dict.fromkeys(BUS_FACTORS, True)
        assert result["checks"] == {name: [count, 0] for name, count in RECEIVED.items()}
        assert result["samples"] == {name: [100, 0] for name in BUS_FACTORS}
        assert result["extremes"] == [[2], [0], [3]]
        assert_broken_ones_are_found(result)
        assert_measured(result["measured"])
        assert {(first, second) for first, second, _ in result["pairs"]} == {(0, 1), (0, 2), (1, 2)}
        assert all(bandwidth > 0 for _, _, bandwidth in result["pairs"])
        assert result["wrong_pairs"] == []
    for what in ("measured", "pairs"):
        assert job.results[0][what] == job.results[1][what] == job.results[2][what]


def assert_broken_ones_are_found(result: dict[str, Any]) -> None:
    """The count is that of the rank with most wrong elements, on all ranks; one element in 241 is right by chance."""
    broken = result["broken"]
    assert broken["OneElementOff"] == [300, 1]
    for name, wrong, checked in (
        ("OneRankMissing", 100, 100),
        ("ShardsSwapped", 200, 300),
        ("NothingSent", 300, 300),
        ("NothingReceived", 300, 300),
    ):
        assert broken[name][0] == checked
        assert 0.9 * wrong < broken[name][1] <= wrong, name
    assert result["broken_sample"][0] == 100
    assert result["broken_sample"][1] > 90


def assert_measured(measured: dict[str, Any]) -> None:
    for dtype, rows in measured.items():
        for name, (size, wrong, median_s, bus_bandwidth) in rows.items():
            # 1000 bytes, less what is no whole number of elements for each rank.
            assert (size, wrong) == (996, 0), (dtype, name)
            assert bus_bandwidth == pytest.approx(996 / median_s / 1e9 * BUS_FACTORS[name])


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_the_command_records_what_it_measured(run_job: RunJob, fresh: bool) -> None:
    said = {"PYTHONWARNINGS": "default::UserWarning"}
    job = run_job("bench.py", "--expect", "0.000001", nodes=2, extra=said, fresh=fresh)
    assert job.exit_code == 0, job.output
    assert job.each("code") == [0, 0]
    assert job.each("group_left") == [False, False]
    if fresh:
        assert job.each("mlflow") == [True, False], "only rank 0 takes the time to import it"
    for words in ("all-reduce reached", "as expected", "Network: gloo over sockets on lo"):
        assert words in job.output
    assert "The results were not all logged into run job-1" in job.output, "there is no such run, and it went on"
    written = json.loads(Path("outputs/bench.json").read_text())
    assert [(row["collective"], row["size"], row["wrong"]) for row in written["collectives"]] == [
        (name, size, 0) for name in BUS_FACTORS for size in (1000, 65536)
    ]
    assert written["conditions"]["nodes"] == written["conditions"]["iterations"] == 2
    assert written["verdict"]["word"] == "as expected"
    assert Path("outputs/bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_sum_fails_the_job(run_job: RunJob) -> None:
    names = "all-reduce,broadcast"
    job = run_job("bench.py", "--break", "--collectives", names, "--output", "wrong.json", "--no-mlflow", nodes=2)
    assert job.each("code") == [1, 0]
    assert job.each("group_left") == [False, False]
    assert "WRONG: all-reduce at 64 KiB: 1 of 16384 elements" in job.output
    written = json.loads(Path("wrong.json").read_text())
    assert {row["collective"]: row["wrong"] for row in written["collectives"]} == {"all-reduce": 1, "broadcast": 0}
    assert written["verdict"]["word"] == "unknown size"


@pytest.mark.root
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_slow_node_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    slow = "tc qdisc replace dev eth0 root tbf rate 50mbit burst 64kb latency 50ms"
    bench = "azureml-strategy bench --pairs --sizes 2MB --iterations 3 --warmup 1 --no-mlflow"
    command = ["sh", "-c", f"[ $NODE_RANK = 1 ] && {slow}; exec {bench}"]
    assert emulate(EmulatedJob(command, nodes=3, isolate=True, bandwidth="500mbit")) == 1
    output = capsys.readouterr().out
    assert "Slow node: 1 (" in output
    found = json.loads(Path("outputs/bench.json").read_text())["pairs"]
    assert (found["diagnosis"]["slow_nodes"], found["diagnosis"]["slow_links"]) == ([1], [])
    bandwidths = {tuple(pair["nodes"]): pair["bus_bandwidth"] for pair in found["bandwidths"]}
    # 50 and 500 Mbit/s in GB/s, of which a stream carries some 95 %.
    assert bandwidths[0, 1] < 0.00625 * 1.1
    assert bandwidths[1, 2] < 0.00625 * 1.1
    assert 2 * max(bandwidths[0, 1], bandwidths[1, 2]) < bandwidths[0, 2] < 0.0625 * 1.2
