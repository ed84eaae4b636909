"""Network interfaces, for NCCL's bootstrap and for sockets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from azureml_strategy.network.files import entries, read_number, read_text

_INFINIBAND, _LOOPBACK = 32, 772  # ARPHRD_INFINIBAND and ARPHRD_LOOPBACK of the kernel's if_arp.h
_DEFAULT_ROUTE = "00000000"


@dataclass(frozen=True)
class Interface:
    """One network interface.

    Attributes:
        name: such as `eth0`.
        up: whether it can carry traffic; the kernel says `unknown` of many virtual ones, which counts as up.
        kind: `ethernet`, `ipoib` (IP over InfiniBand) or `loopback`.
        speed_gbps: link rate in Gb/s; None where the driver does not say it.
        default_route: whether the default route goes through it.
    """

    name: str
    up: bool
    kind: str
    speed_gbps: float | None
    default_route: bool


def read_interfaces(sysfs: str | Path = "/sys", proc: str | Path = "/proc") -> tuple[Interface, ...]:
    """The interfaces of this process's network namespace, by name."""
    default = _default_interfaces(Path(proc) / "net/route")
    folders = entries(Path(sysfs) / "class/net")
    return tuple(_read(folder, folder.name in default) for folder in folders if read_text(folder / "operstate"))


def bootstrap_interface(interfaces: tuple[Interface, ...]) -> Interface | None:
    """The interface by which nodes meet: `eth0`, which every Azure VM has, else that of the default route."""
    usable = [interface for interface in interfaces if interface.up and interface.kind == "ethernet"]
    eth0 = next((interface for interface in usable if interface.name == "eth0"), None)
    return eth0 or next((interface for interface in usable if interface.default_route), None)


def _read(folder: Path, default_route: bool) -> Interface:
    kinds = {_INFINIBAND: "ipoib", _LOOPBACK: "loopback"}
    speed = read_number(folder / "speed")  # in Mb/s, -1 where unknown
    return Interface(
        name=folder.name,
        up=read_text(folder / "operstate") in ("up", "unknown"),
        kind=kinds.get(read_number(folder / "type") or 0, "ethernet"),
        speed_gbps=speed / 1000 if speed and speed > 0 else None,
        default_route=default_route,
    )


def _default_interfaces(route: Path) -> set[str]:
    """Interfaces of default routes: lines of `Iface Destination Gateway ...`, addresses in hexadecimal."""
    rows = [line.split() for line in (read_text(route) or "").splitlines()[1:]]
    return {row[0] for row in rows if len(row) > 7 and row[1] == row[7] == _DEFAULT_ROUTE}
