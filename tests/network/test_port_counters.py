from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.network.conftest import Tree

from azureml_strategy.network.port_counters import (
    Growth,
    grown,
    read_ethernet_counters,
    read_infiniband_counters,
)


def count(tree: Tree, adapter: str, **counters: int) -> None:
    for name, value in counters.items():
        tree.write(f"sys/class/infiniband/{adapter}/ports/1/counters/{name}", f"{value}\n")


def test_counters_of_infiniband_ports_alone(tree: Tree) -> None:
    tree.nd96isr_h100_v5()
    count(tree, "mlx5_ib3", symbol_error=7, port_rcv_data=1000)
    count(tree, "mlx5_an0", symbol_error=9)  # accelerated networking
    assert read_infiniband_counters(tree.root / "sys") == {
        ("mlx5_ib3:1", "symbol_error"): 7,
        ("mlx5_ib3:1", "port_rcv_data"): 1000,
    }


def test_what_cannot_be_read_is_left_out(tree: Tree, tmp_path: Path) -> None:
    assert read_infiniband_counters(tmp_path / "nothing") == {}
    tree.hca("mlx5_ib0")
    count(tree, "mlx5_ib0", link_downed=1, symbol_error=0)
    tree.write("sys/class/infiniband/mlx5_ib0/ports/1/counters/port_rcv_errors", "N/A (no PMA)\n")
    folder = tree.root / "sys/class/infiniband/mlx5_ib0/ports/1/counters"
    (folder / "symbol_error").unlink()
    (folder / "symbol_error").mkdir()  # opens with an error, as a virtual function's counter may
    assert read_infiniband_counters(tree.root / "sys") == {("mlx5_ib0:1", "link_downed"): 1}


def test_ethernet_is_the_interface_through_which_nodes_meet(tree: Tree) -> None:
    tree.azure()
    tree.interface("enP1s1", speed=50000)  # the virtual function behind eth0
    for interface, received in (("eth0", 5000), ("enP1s1", 4900), ("lo", 7)):
        tree.write(f"sys/class/net/{interface}/statistics/rx_bytes", f"{received}\n")
    assert read_ethernet_counters(tree.root / "sys", tree.root / "proc") == {("eth0", "rx_bytes"): 5000}
    assert read_ethernet_counters(tree.root / "nothing", tree.root / "nothing") == {}


@pytest.mark.parametrize(
    ("before", "now", "growth"),
    [
        (5, 5, 0),
        (5, 12, 7),
        (12, 5, 5),  # reset: five since then
        (2**32 - 3, 4, 7),
        (2**64 - 3, 4, 7),
        (2**40, 4, 4),
        (2**32 - 1, 2**31, 2**31),  # too far for one turn
    ],
)
def test_growth_of_a_counter_that_wraps_or_is_reset(before: int, now: int, growth: int) -> None:
    assert grown(before, now) == growth


def test_growth_counts_from_the_first_reading_of_each_port() -> None:
    growth = Growth()
    growth.update({("a:1", "link_downed"): 40})
    assert growth.of("link_downed") == 0
    assert growth.of("symbol_error") is None
    growth.update({("b:1", "link_downed"): 100})  # a has vanished, b has come
    growth.update({("a:1", "link_downed"): 42, ("b:1", "link_downed"): 101})
    assert growth.of("link_downed", "symbol_error") == 3
    assert growth.by_port("link_downed") == {"a:1": 2, "b:1": 1}


def test_the_real_machine_can_be_read() -> None:
    if not os.path.isdir("/sys/class/net"):
        pytest.skip("no sysfs")
    read_infiniband_counters()
    read_ethernet_counters()
