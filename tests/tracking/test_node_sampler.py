from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
from tests.network.conftest import Tree

from azureml_strategy.tracking.node_sampler import NodeSampler, is_nearly_full

COUNTERS = "sys/class/infiniband/mlx5_ib0/ports/1/counters"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path / "root")
    tree.azure()
    tree.hca("mlx5_ib0")
    return tree


class Sampled:
    def __init__(self, tree: Tree, checkpoints: Path | None = None) -> None:
        self.warnings: dict[str, str] = {}
        self.sampler = NodeSampler(self.warnings.setdefault, lambda: checkpoints, tree.root / "sys")

    def __call__(self) -> dict[str, float]:
        return self.sampler.sample()


def test_the_names_and_values_of_mlflow(tree: Tree) -> None:
    sampled = Sampled(tree)
    monitors = CPUMonitor(), DiskMonitor(), NetworkMonitor()
    theirs: dict[str, float] = {}
    for monitor in monitors:
        monitor.collect_metrics()
        theirs |= monitor.aggregate_metrics()
    ours = sampled()
    assert theirs.keys() <= ours.keys()
    for name in ("disk_usage_megabytes", "system_memory_usage_megabytes"):
        assert ours[name] == pytest.approx(theirs[name], rel=0.2)
    assert 0 <= ours["cpu_utilization_percentage"] <= 100


def test_bytes_and_errors_of_the_ports_since_the_start(tree: Tree) -> None:
    tree.write(f"{COUNTERS}/port_rcv_data", "1000000")
    tree.write(f"{COUNTERS}/port_xmit_data", "0")
    tree.write(f"{COUNTERS}/symbol_error", "3")
    sampled = Sampled(tree)
    tree.write(f"{COUNTERS}/port_rcv_data", "2000000")
    tree.write(f"{COUNTERS}/symbol_error", "8")
    figures = sampled()
    assert figures["infiniband_receive_megabytes"] == 4  # words of four bytes
    assert figures["infiniband_transmit_megabytes"] == 0
    assert figures["infiniband_receive_megabytes_per_second"] > 0
    assert figures["infiniband_errors"] == 5
    assert "infiniband_link_downs" not in figures  # there is no such counter
    assert sampled.warnings == {}  # a few symbol errors are normal on a fast link


@pytest.mark.parametrize(
    ("counter", "count"), [("link_downed", 1), ("symbol_error", 50), ("local_link_integrity_errors", 1)]
)
def test_errors_that_count_up_are_told(tree: Tree, counter: str, count: int) -> None:
    tree.write(f"{COUNTERS}/{counter}", "4")
    sampled = Sampled(tree)
    sampled()
    assert sampled.warnings == {}  # from before
    tree.write(f"{COUNTERS}/{counter}", f"{4 + count}")
    sampled()
    (text,) = sampled.warnings.values()
    assert f"port mlx5_ib0:1 counted {count} {counter}" in text
    assert "azureml-strategy doctor" in text
    assert "azureml-strategy bench --pairs" in text


def test_an_adapter_that_vanishes_ends_nothing(tree: Tree) -> None:
    tree.write(f"{COUNTERS}/link_downed", "0")
    sampled = Sampled(tree)
    (tree.root / "sys/class/infiniband").rename(tree.root / "gone")
    assert "cpu_utilization_percentage" in sampled()


def test_the_disk_of_the_checkpoints(tree: Tree, tmp_path: Path) -> None:
    figures = Sampled(tree, tmp_path / "run" / "checkpoints")()  # not there yet
    assert figures["checkpoint_disk_usage_percentage"] == pytest.approx(psutil.disk_usage(str(tmp_path)).percent, abs=1)
    assert figures["checkpoint_disk_available_megabytes"] > 0
    assert not any("checkpoint" in name for name in Sampled(tree)())


def test_a_disk_that_is_nearly_full_is_told(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_nearly_full(94.9, 1000.0)
    assert not is_nearly_full(99.0, 500e3)  # of 50 TB
    # A full disk cannot be had here: psutil's answer is replaced.
    full = SimpleNamespace(total=1e12, used=0.97e12, free=0.03e12, percent=97.0)
    monkeypatch.setattr(psutil, "disk_usage", lambda path: full)
    sampled = Sampled(tree, tmp_path)
    (text,) = sampled.warnings.values()
    assert f"{tmp_path}, is 97 % full: 30.0 GB are left" in text
    assert "`checkpoint.keep_last`" in text


def test_a_source_that_fails_is_told_once_and_left_out(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    def denied() -> None:
        raise PermissionError("/proc/meminfo")

    caplog.set_level("INFO")
    monkeypatch.setattr(psutil, "virtual_memory", denied)
    sampled = Sampled(tree)
    figures = sampled()
    assert "cpu_utilization_percentage" in figures
    assert "system_memory_usage_megabytes" not in figures
    told = [record.getMessage() for record in caplog.records if "memory" in record.getMessage()]
    assert told == ["Counters: the memory cannot be read (PermissionError: /proc/meminfo)."]


def test_without_psutil(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(ImportError, match="psutil"):
        Sampled(tree)
