"""Reads InfiniBand adapters from sysfs.

Many Azure ML images lack tools such as ibv_devinfo; sysfs is always there. The name of a device does not tell
InfiniBand from Ethernet: the accelerated-networking card is also an `mlx5` device, and NCCL calls it "IB".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from azureml_strategy.network.sysfs import entries, read_number, read_text

# The top bit of a partition key means full membership (InfiniBand Architecture Specification, 10.9.3). The key 0x8000
# itself names no partition.
_FULL_MEMBERSHIP = 0x8000
_RATE = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*Gb/sec", re.I)
_STATE = re.compile(r"[0-9]+:\s*(\w+)")  # "4: ACTIVE"


@dataclass(frozen=True)
class HCA:
    """One port of one adapter. A value is None if sysfs does not have it.

    Attributes:
        name: device name, such as `mlx5_ib0`.
        port: port number, from 1.
        link_layer: `InfiniBand`, or `Ethernet` for accelerated networking and RoCE.
        state: logical state: `ACTIVE`, `INIT`, `DOWN`.
        physical_state: `LinkUp`, `Polling` (no cable or no switch), ...
        rate_gbps: signalling rate of the link in Gb/s.
        full_pkey: index of the first partition key with full membership; None if the port has joined no partition.
        numa_node: NUMA node of the PCI device; None if the VM hides it.
        verbs_device: device such as `uverbs0`, if its file is in /dev/infiniband; None if a container lacks it.
    """

    name: str
    port: int
    link_layer: str | None
    state: str | None
    physical_state: str | None
    rate_gbps: float | None
    full_pkey: int | None
    numa_node: int | None
    verbs_device: str | None

    @property
    def is_infiniband(self) -> bool:
        """Whether the port speaks InfiniBand, working or not."""
        return self.link_layer == "InfiniBand"

    @property
    def is_ethernet(self) -> bool:
        """Whether the port speaks Ethernet, over which NCCL would run RoCE."""
        return self.link_layer == "Ethernet"

    @property
    def fault(self) -> str | None:
        """Why NCCL cannot use the port for InfiniBand; None if it can."""
        if not self.is_infiniband:
            return f"its link layer is {self.link_layer or 'unknown'}, not InfiniBand"
        if self.state != "ACTIVE":
            return f"its port is {self.state or 'in an unknown state'} ({self.physical_state or 'link unknown'})"
        if self.full_pkey is None:
            return "it is full member of no partition (pkey)"
        if self.verbs_device is None:
            return "its device file is not in /dev/infiniband"
        return None

    @property
    def usable(self) -> bool:
        """Whether NCCL can use the port for InfiniBand."""
        return self.fault is None


def read_hcas(sysfs: str | Path = "/sys", devices: str | Path = "/dev") -> tuple[HCA, ...]:
    """Read every port of every RDMA adapter, usable or not, in the order of their numbers.

    Args:
        sysfs: mount point of sysfs.
        devices: folder of the device files.
    """
    present = {entry.name for entry in entries(Path(devices) / "infiniband")}
    names = {read_text(each / "ibdev"): each.name for each in entries(Path(sysfs) / "class/infiniband_verbs")}
    verbs = {adapter: name for adapter, name in names.items() if name in present}
    return tuple(
        _read_port(adapter, port, verbs.get(adapter.name))
        for adapter in adapters(sysfs)
        for port in _numbered(adapter / "ports")
    )


def adapters(sysfs: str | Path) -> list[Path]:
    """The folder of each RDMA adapter in sysfs, in the order of their numbers."""
    return sorted(entries(Path(sysfs) / "class/infiniband"), key=lambda folder: natural_order(folder.name))


def natural_order(name: str) -> tuple[tuple[str, int], ...]:
    """A sort key that puts `mlx5_10` after `mlx5_9`."""
    return tuple((text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", name))


def _read_port(adapter: Path, port: int, verbs_device: str | None) -> HCA:
    folder = adapter / "ports" / str(port)
    rate = _RATE.match(read_text(folder / "rate") or "")
    numa_node = read_number(adapter / "device/numa_node")
    # One by one, as each read may ask the adapter's firmware: tables have 128 keys, and the first one is usually full.
    keys = ((index, read_number(folder / "pkeys" / str(index), base=16) or 0) for index in _numbered(folder / "pkeys"))
    return HCA(
        name=adapter.name,
        port=port,
        link_layer=read_text(folder / "link_layer"),
        state=_state(folder / "state"),
        physical_state=_state(folder / "phys_state"),
        rate_gbps=float(rate[1]) if rate else None,
        full_pkey=next((index for index, key in keys if key > _FULL_MEMBERSHIP), None),
        numa_node=numa_node if numa_node is not None and numa_node >= 0 else None,
        verbs_device=verbs_device,
    )


def _state(path: Path) -> str | None:
    state = _STATE.match(read_text(path) or "")
    return state[1] if state else None


def _numbered(folder: Path) -> list[int]:
    return sorted(int(entry.name) for entry in entries(folder) if entry.name.isdecimal())
