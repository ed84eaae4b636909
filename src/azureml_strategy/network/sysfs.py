"""Reads network interfaces and GPUs from Linux's files in /sys and /proc."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_MOST_BYTES = 64 * 1024  # an attribute of sysfs holds at most a page

_DEFAULT_ROUTE = "00000000"
_NVIDIA_MODEL = re.compile(r"^Model:\s*(.+)$", re.M)
_CUDA_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED of CUresult, the driver's cuda.h
_AMD_NODE = re.compile(r"^simd_count\s+([1-9]\d*)$", re.M)


def read_text(path: Path) -> str | None:
    """The stripped content of a file; None if it cannot be read, because a diagnostic must not stop training."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return None


def read_number(path: Path, base: int = 10) -> int | None:
    """The integer in a file; None if there is none."""
    text = read_text(path)
    try:
        return int(text, base) if text else None
    except ValueError:
        return None


def entries(folder: Path) -> list[Path]:
    """The entries of a folder, sorted by name; empty if it cannot be listed."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


@dataclass(frozen=True)
class Interface:
    """One network interface.

    Attributes:
        name: such as `eth0`.
        up: whether it can carry traffic. `unknown`, which the kernel reports for many virtual ones, counts as up.
        kind: `ethernet`, `ipoib` (IP over InfiniBand) or `loopback`.
        speed_gbps: link rate in Gb/s; None if the driver does not report it.
        default_route: whether the default route goes through it.
    """

    name: str
    up: bool
    kind: str
    speed_gbps: float | None
    default_route: bool


def read_interfaces(sysfs: str | Path = "/sys", proc: str | Path = "/proc") -> tuple[Interface, ...]:
    """Read the interfaces of this process's network namespace, sorted by name."""
    default = _default_interfaces(Path(proc) / "net/route")
    folders = entries(Path(sysfs) / "class/net")
    return tuple(_read(folder, folder.name in default) for folder in folders if read_text(folder / "operstate"))


def bootstrap_interface(interfaces: tuple[Interface, ...]) -> Interface | None:
    """The interface through which nodes meet: `eth0`, which every Azure VM has, else that of the default route."""
    usable = [interface for interface in interfaces if interface.up and interface.kind == "ethernet"]
    eth0 = next((interface for interface in usable if interface.name == "eth0"), None)
    return eth0 or next((interface for interface in usable if interface.default_route), None)


def _read(folder: Path, default_route: bool) -> Interface:
    kinds = {32: "ipoib", 772: "loopback"}  # ARPHRD_INFINIBAND and ARPHRD_LOOPBACK of the kernel's if_arp.h
    speed = read_number(folder / "speed")  # in Mb/s, -1 where unknown
    return Interface(
        name=folder.name,
        up=read_text(folder / "operstate") in ("up", "unknown"),
        kind=kinds.get(read_number(folder / "type") or 0, "ethernet"),
        speed_gbps=speed / 1000 if speed and speed > 0 else None,
        default_route=default_route,
    )


def _default_interfaces(route: Path) -> set[str]:
    """Interfaces of default routes, from lines of `Iface Destination Gateway ...` with hexadecimal addresses."""
    rows = [line.split() for line in (read_text(route) or "").splitlines()[1:]]
    return {row[0] for row in rows if len(row) > 7 and row[1] == row[7] == _DEFAULT_ROUTE}


@dataclass(frozen=True)
class GPUs:
    """The node's GPUs.

    Attributes:
        vendor: `nvidia` (NCCL) or `amd` (RCCL); None without GPUs.
        models: one name for each GPU, such as `NVIDIA H100 80GB HBM3`; empty if the driver hides it, as AMD's does.
    """

    vendor: Literal["nvidia", "amd"] | None
    models: tuple[str, ...]


def read_gpus(sysfs: str | Path = "/sys", proc: str | Path = "/proc", devices: str | Path = "/dev") -> GPUs:
    """Read the GPUs that the NVIDIA or the AMD driver shows.

    A container may have the device files without the driver's folder in /proc. Then only the number of GPUs is known.
    """
    nvidia = [read_text(folder / "information") for folder in entries(Path(proc) / "driver/nvidia/gpus")]
    if nvidia:
        models = (_NVIDIA_MODEL.search(text or "") for text in nvidia)
        return GPUs("nvidia", tuple(model[1].strip() if model else "" for model in models))
    files = [entry for entry in entries(Path(devices)) if re.fullmatch(r"nvidia\d+", entry.name)]
    if files:
        return GPUs("nvidia", ("",) * len(files))
    # This topology also lists CPUs, which have no SIMD units.
    amd = [
        folder
        for folder in entries(Path(sysfs) / "class/kfd/kfd/topology/nodes")
        if _AMD_NODE.search(read_text(folder / "properties") or "")
    ]
    # The name in the folder is only that of a chip family: `ip discovery` for MI300X, `aldebaran` for MI200.
    return GPUs("amd", ("",) * len(amd)) if amd else GPUs(None, ())


def gpudirect_support(sysfs: str | Path = "/sys", proc: str | Path = "/proc") -> str | None:
    """What lets an adapter read and write GPU memory directly (GPUDirect RDMA); None if nothing does.

    This is a kernel module of either vendor, or DMA-BUF, which NVIDIA's open driver has and NCCL uses since 2.13.
    """
    for module in ("nvidia_peermem", "nv_peer_mem"):
        if (Path(sysfs) / "module" / module).is_dir():
            return module
    if read_text(Path(sysfs) / "kernel/mm/memory_peers/nv_mem/version"):
        return "nv_mem"
    if "Open Kernel Module" in (read_text(Path(proc) / "driver/nvidia/version") or ""):
        return "DMA-BUF"
    if (Path(sysfs) / "module/amdgpu").is_dir():
        return "amdgpu"
    return None


def cuda_started(library: str = "libcuda.so.1") -> bool:
    """Whether this process has started CUDA. CUDA numbers the GPUs at its start and never again.

    torch.cuda.is_initialized() does not tell, because torch.cuda.is_available() may start the driver too. The driver's
    library refuses to report the number of GPUs before it was started.
    """
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _CUDA_NOT_INITIALIZED
