"""Excerpts of public logs of NCCL; each json in tests/samples/nccl_logs names its source and the right verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from azureml_strategy.network.nccl_log import describe, read_transport

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
FILES = sorted((Path(__file__).parents[2] / "samples" / "nccl_logs").glob("*.json"))
DESCRIPTIONS = {
    "02": "InfiniBand, 8 HCAs (mlx5_ib0 ... mlx5_ib7), GPUDirect RDMA",
    "05": "inside nodes only, P2P/IPC/read",
    "10": "RoCE (verbs over Ethernet), 1 HCA (mlx5_an0), no channel seen yet",
    "12": "TCP sockets, eth0, no channel seen yet",
    "13": "InfiniBand, 1 HCA (ibP111p0s0), no channel seen yet",
    "19": "InfiniBand, 3 HCAs (mlx5_1 ... mlx5_3), no GPUDirect RDMA",
    "24": "InfiniBand, 1 HCA (mlx5_4), GPUDirect RDMA",
    "27": "RoCE (verbs over Ethernet), 2 HCAs (mlx5_10, mlx5_11), no channel seen yet",
    "37": "TCP sockets, ibs108, no channel seen yet",
    "40": "TCP sockets, ibs85f0",
    "44": "nothing established: NCCL failed at start",
    "49": "libfabric, no GPUDirect RDMA",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sample(path: Path) -> None:
    sample: dict[str, Any] = json.loads(path.read_text())
    transport = read_transport(path.with_suffix(".log"))
    assert transport.kind in sample.get("transport_any_of", [sample["transport"].removeprefix("none/")])
    assert transport.gpudirect is sample["gdr"]
    assert set(transport.hcas) == set(sample["hcas"])
    assert transport.interface == sample["interface"]
    assert transport.evidence == sample["evidence"].removesuffix("+error")
    assert len(transport.errors) == len(sample["errors"])
    for text in sample["errors"]:
        assert any(text in str(error) for error in transport.errors)


@pytest.mark.parametrize(
    ("name", "attribute"),
    [("plugin", "plugin"), ("nccl_version", "nccl_version"), ("p2p", "intra_node")],
)
def test_what_some_samples_tell_besides(name: str, attribute: str) -> None:
    told = {path.stem: json.loads(path.read_text()).get(name) for path in FILES}
    expected = {stem: value for stem, value in told.items() if value is not None}
    assert expected
    read = {path.stem: getattr(read_transport(path.with_suffix(".log")), attribute) for path in FILES}
    assert {stem: read[stem] for stem in expected} == expected


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_description(path: Path) -> None:
    assert describe(read_transport(path.with_suffix(".log"))) == DESCRIPTIONS[path.stem[:2]]


def test_every_error_of_the_samples_is_explained() -> None:
    errors = [error for path in FILES for error in read_transport(path.with_suffix(".log")).errors]
    assert {error.name for error in errors} == {"sharp", "libibverbs", "completion 12", "no interface", "ofi"}


def test_the_wrapped_message_of_sample_13_is_whole() -> None:
    (error,) = read_transport(next(path for path in FILES if path.stem.startswith("13")).with_suffix(".log")).errors
    assert error.text.endswith("with error 12, opcode 0, len 0, vendor err 129 (Recv)")
    assert "scale set" in error.fix


def test_counts_of_sample_02() -> None:
    transport = read_transport(FILES[0].with_suffix(".log"))
    assert (transport.network_channels, transport.local_channels) == (62, 192)
    assert (len(transport.hosts), transport.ranks, transport.sharp) == (4, 32, "failed")
    assert [error.count for error in transport.errors] == [4]


def test_interfaces_and_other_devices() -> None:
    by_number = {path.stem[:2]: read_transport(path.with_suffix(".log")) for path in FILES}
    assert by_number["12"].interfaces == ("eth0", "enP7906s1")
    assert by_number["37"].interfaces == tuple(f"ibs{number}" for number in range(108, 116))
    assert by_number["13"].other_devices == ("rdmaP1111p0s2",)


def test_the_samples_are_there() -> None:
    assert len(FILES) == 12


@pytest.mark.parametrize(
    ("job", "ranks", "refused"),
    [("one_process_for_each_gpu", 1, 0), ("two_processes_on_one_gpu", 2, 2)],
)
def test_the_logs_of_an_h100(job: str, ranks: int, refused: int) -> None:
    """Logs that benchmarks/nccl_gpu.py wrote on a machine with one GPU, where NCCL refuses a second rank on it."""
    transport = read_transport(RESULTS / f"nccl_gpu.{job}.log")
    assert (transport.kind, transport.interface, transport.gpudirect) == ("socket", "eth0", False)
    assert (transport.nccl_version, transport.ranks, transport.evidence) == ("2.28.9", ranks, "init")
    assert sum(error.count for error in transport.errors if error.name == "duplicate GPU") == refused
    assert all(error.fix.startswith("Start at most") for error in transport.errors if error.name == "duplicate GPU")
    missed = [error.name for error in transport.errors if error.name != "duplicate GPU"]
    # One node misses no network. The other log ends before NCCL says how many nodes there are.
    assert missed == ([] if ranks == 1 else ["no device"])
