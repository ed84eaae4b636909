"""GPUs of the node, as the drivers show them to any process: no CUDA is started."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from azureml_strategy.network.files import entries, read_text

_NVIDIA_MODEL = re.compile(r"^Model:\s*(.+)$", re.M)
_CUDA_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED of CUresult, the driver's cuda.h
_AMD_NODE = re.compile(r"^simd_count\s+([1-9]\d*)$", re.M)


@dataclass(frozen=True)
class GPUs:
    """The node's GPUs.

    Attributes:
        vendor: whose they are; `nvidia` has NCCL, `amd` has RCCL. None without GPUs.
        models: one name for each GPU, such as `NVIDIA H100 80GB HBM3`; an empty one where the driver hides it, as
            AMD's does.
    """

    vendor: Literal["nvidia", "amd"] | None
    models: tuple[str, ...]


def read_gpus(sysfs: str | Path = "/sys", proc: str | Path = "/proc", devices: str | Path = "/dev") -> GPUs:
    """The GPUs that the NVIDIA or the AMD driver shows.

    A container may have the device files without the driver's folder in /proc; then only the number is known.
    """
    nvidia = [read_text(folder / "information") for folder in entries(Path(proc) / "driver/nvidia/gpus")]
    if nvidia:
        return GPUs("nvidia", tuple(_nvidia_model(text or "") for text in nvidia))
    files = [entry for entry in entries(Path(devices)) if re.fullmatch(r"nvidia\d+", entry.name)]
    if files:
        return GPUs("nvidia", ("",) * len(files))
    # CPUs are nodes of this topology too, with no SIMD units.
    amd = [
        folder
        for folder in entries(Path(sysfs) / "class/kfd/kfd/topology/nodes")
        if _AMD_NODE.search(read_text(folder / "properties") or "")
    ]
    # What the folder has for a name is that of a chip family: `ip discovery` for MI300X, `aldebaran` for MI200.
    return GPUs("amd", ("",) * len(amd)) if amd else GPUs(None, ())


def gpudirect_support(sysfs: str | Path = "/sys", proc: str | Path = "/proc") -> str | None:
    """What lets an adapter read and write GPU memory by itself (GPUDirect RDMA); None where nothing does.

    The kernel module of either vendor, or DMA-BUF, which NVIDIA's open driver has and NCCL uses since 2.13.
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
    """Whether this process has started CUDA, which numbers the GPUs then and never again.

    torch.cuda.is_initialized() does not know it: torch.cuda.is_available() may start the driver as well.

    Args:
        library: CUDA's driver; asked for the number of GPUs, which it refuses to tell before it was started.
    """
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _CUDA_NOT_INITIALIZED


def _nvidia_model(information: str) -> str:
    model = _NVIDIA_MODEL.search(information)
    return model[1].strip() if model else ""
