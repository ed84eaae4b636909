"""Reads what ports of adapters have counted: bytes, errors and lost links, of InfiniBand and of Ethernet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from azureml_strategy.network.infiniband import adapters
from azureml_strategy.network.sysfs import bootstrap_interface, entries, read_interfaces, read_number, read_text

RECEIVED, SENT, LINK_DOWNED = "port_rcv_data", "port_xmit_data", "link_downed"
# These hardly grow on a healthy link of InfiniBand. Other counters are no sign of a fault here: packets wait or are
# dropped under congestion, and a remote switch marks errors of its own.
ERRORS = (
    "symbol_error",
    "link_error_recovery",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
# The unit of `port_rcv_data` and `port_xmit_data`: InfiniBand Architecture Specification, 16.1.3.5.
BYTES_PER_WORD = 4
# Of Ethernet, in bytes and packets: the kernel's Documentation/ABI/testing/sysfs-class-net-statistics.
ETHERNET = ("rx_bytes", "tx_bytes", "rx_errors", "tx_errors")
# Counters of old adapters have 32 bits, all others 64.
_SIZES = (2**32, 2**64)


def read_infiniband_counters(sysfs: str | Path = "/sys") -> dict[tuple[str, str], int]:
    """Read the counters of every InfiniBand port.

    Azure's adapters are virtual functions, which may lack some counters or deny them. These are left out, and so are
    the ports of Ethernet adapters, such as that of accelerated networking.

    Returns:
        Each value by port, such as `mlx5_ib0:1`, and counter, such as `symbol_error`. The data counters count words of
        four bytes.
    """
    found: dict[tuple[str, str], int] = {}
    for adapter in adapters(sysfs):
        for port in entries(adapter / "ports"):
            if read_text(port / "link_layer") == "InfiniBand":
                counters = (RECEIVED, SENT, LINK_DOWNED, *ERRORS)
                found |= _read_counters(f"{adapter.name}:{port.name}", port / "counters", counters)
    return found


def read_ethernet_counters(sysfs: str | Path = "/sys", proc: str | Path = "/proc") -> dict[tuple[str, str], int]:
    """Read the counters of the interface through which nodes meet.

    The sum over all interfaces would count most bytes twice on Azure, where `eth0` counts what its virtual function
    (accelerated networking) carries.

    Returns:
        Each value by interface and counter, see `ETHERNET`; empty without such an interface.
    """
    interface = bootstrap_interface(read_interfaces(sysfs, proc))
    if interface is None:
        return {}
    return _read_counters(interface.name, Path(sysfs) / "class/net" / interface.name / "statistics", ETHERNET)


def _read_counters(port: str, folder: Path, names: tuple[str, ...]) -> dict[tuple[str, str], int]:
    """The counters of one port that its folder has."""
    found = {(port, name): read_number(folder / name) for name in names}
    return {key: value for key, value in found.items() if value is not None}


class Growth:
    """How much counters have grown since they were first read. A counter may wrap around, be reset, or go away."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], int] = {}
        self._total: dict[tuple[str, str], int] = {}

    def update(self, values: Mapping[tuple[str, str], int]) -> None:
        """Take new values. A counter that is seen for the first time has not grown yet."""
        for key, value in values.items():
            self._total[key] = self._total.get(key, 0) + grown(self._last.get(key, value), value)
            self._last[key] = value

    def of(self, *counters: str) -> int | None:
        """Return the growth of some counters over all ports; None if no port has any of them."""
        found = [total for (_, name), total in self._total.items() if name in counters]
        return sum(found) if found else None

    def by_port(self, counter: str) -> dict[str, int]:
        """Return the growth of one counter on each port that has it."""
        return {port: total for (port, name), total in self._total.items() if name == counter}


def grown(before: int, now: int) -> int:
    """Return how much a counter has grown between two readings.

    A lower value means that it was reset, and has counted up from 0 since. It has wrapped around if it was in the last
    quarter of its 32 or 64 bits, and is in the first one now.
    """
    if now >= before:
        return now - before
    for size in _SIZES:
        if 3 * size // 4 <= before < size and now < size // 4:
            return now + size - before
    return now
