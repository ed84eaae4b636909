"""What a VM size should reach, and what is said of what it does reach."""

from __future__ import annotations

from dataclasses import replace

import pytest

from azureml_strategy.bench.results import (
    AS_EXPECTED,
    BELOW,
    HALF,
    NOTHING_KNOWN,
    UNKNOWN_SIZE,
    Expectation,
    expect,
    judge,
)
from azureml_strategy.network.vm_sizes import VMSize, lookup_vm_size

H100 = lookup_vm_size("Standard_ND96isr_H100_v5")


def expected(size: VMSize | None, nodes: int, backend: str = "nccl", processes_per_node: int = 8) -> Expectation:
    return expect(size, backend=backend, nodes=nodes, processes_per_node=processes_per_node)


def test_published_figures() -> None:
    assert H100.bus_bandwidth == 460
    assert expected(H100, 1) == Expectation(460, "what is published for Standard_ND96isr_H100_v5, one node")
    two = Expectation(H100.bus_bandwidth_two_nodes, "what is published for Standard_ND96isr_H100_v5, two nodes")
    assert two.bandwidth
    assert expected(H100, 2) == expected(H100, 32) == two


def test_line_rates_where_nothing_is_published() -> None:
    unpublished = replace(H100, bus_bandwidth_two_nodes=None)
    of_hcas = expected(unpublished, 2)
    assert (of_hcas.bandwidth, of_hcas.is_line_rate) == (8 * 400 / 8, True)
    assert "8 HCAs of 400 Gb/s" in of_hcas.reason
    assert "upper bound" in of_hcas.reason
    of_ethernet = expected(replace(unpublished, hcas=0), 2)
    assert (of_ethernet.bandwidth, of_ethernet.is_line_rate) == (80 / 8, True)
    assert expected(H100, 2, "gloo") == of_ethernet


@pytest.mark.parametrize(
    ("size", "nodes", "backend", "processes", "words"),
    [
        (None, 2, "nccl", 8, "does not name its VM size; give --expect"),
        (lookup_vm_size("Standard_ND256isr_Z900_v9"), 2, "nccl", 8, "not in the table; give --expect"),
        (H100, 2, "nccl", 1, "has 8 GPUs, and 1 of them took part"),
        (H100, 1, "gloo", 8, "meets no network"),
        (replace(H100, bus_bandwidth=None), 1, "nccl", 8, "no figure is published"),
        (replace(H100, ethernet_gbps=None), 2, "gloo", 8, "Ethernet of Standard_ND96isr_H100_v5 is not published"),
    ],
)
def test_nothing_to_go_by(size: VMSize | None, nodes: int, backend: str, processes: int, words: str) -> None:
    found = expected(size, nodes, backend, processes)
    assert found.bandwidth is None
    assert words in found.reason
    known = size is not None and size.known
    assert judge(1, found, in_ring=True).word == (NOTHING_KNOWN if known else UNKNOWN_SIZE)


def test_the_user_knows_better() -> None:
    found = expect(H100, backend="nccl", nodes=2, processes_per_node=1, given=0.125)
    assert found == Expectation(0.125, "as --expect says")


@pytest.mark.parametrize(
    ("measured", "in_ring", "is_line_rate", "word"),
    [
        (120, True, False, AS_EXPECTED),
        (90, True, False, AS_EXPECTED),
        (89, True, False, BELOW),
        (61, True, False, BELOW),
        (60, True, False, HALF),
        (40, True, False, HALF),
        (39, True, False, BELOW),
        (50, False, False, BELOW),
        (50, True, True, BELOW),
        (0, True, False, BELOW),
    ],
)
def test_words(measured: float, in_ring: bool, is_line_rate: bool, word: str) -> None:
    assert judge(measured, Expectation(100, "", is_line_rate), in_ring=in_ring).word == word


def test_the_line() -> None:
    good = judge(0.119, Expectation(0.125, "as --expect says"), in_ring=True)
    assert good.text == "all-reduce reached 0.119 GB/s: as expected (95% of 0.125 GB/s, as --expect says)"
    unknown = judge(3, Expectation(None, "why", known_size=False), in_ring=True)
    assert unknown.text == "all-reduce reached 3 GB/s: unknown size (why)"
