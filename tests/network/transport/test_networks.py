from __future__ import annotations

import pytest

from azureml_strategy.network.transport.networks import family, fastest, slowest


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        ("IB", "verbs"),
        ("IBext", "verbs"),
        ("IBext_v10", "verbs"),
        ("NCCL RDMA Plugin v9", "verbs"),
        ("UCX", "verbs"),
        ("UCX-RMA", "verbs"),
        ("gIB", "verbs"),
        ("SHARP", "verbs"),
        ("Socket", "socket"),
        ("FastSocket", "socket"),
        ("AWS Libfabric", "ofi"),
        ("Libfabric", "ofi"),
        ("OFI", "ofi"),
        ("FasTrak", None),
        ("IBIS", None),
        ("SocketPlus", None),
        ("", None),
    ],
)
def test_family(network: str, expected: str | None) -> None:
    assert family(network) == expected


def test_the_slowest_sets_the_pace() -> None:
    assert slowest(["ib", "socket", "roce"]) == "socket"
    assert slowest(["ib", "roce"]) == "roce"
    assert slowest(["ib", "unknown"]) == "ib"
    assert slowest([]) == slowest(["unknown"]) == "unknown"


def test_the_fastest_could_be_used() -> None:
    assert fastest(["socket", "ib", "roce"]) == "ib"
    assert fastest(["socket", "unknown"]) == "socket"
    assert fastest([]) == "unknown"
