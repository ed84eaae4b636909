"""Reads the counters of this node: processors, memory, disks, network, and the NVIDIA driver's of the GPUs. Warns of
faults that they show.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from azureml_strategy.lazy import install_line
from azureml_strategy.network.port_counters import (
    BYTES_PER_WORD,
    ERRORS,
    LINK_DOWNED,
    RECEIVED,
    SENT,
    Growth,
    read_ethernet_counters,
    read_infiniband_counters,
)
from azureml_strategy.network.sysfs import read_gpus

# Reasons for low clocks that are a fault, with an explanation. NVML gives the reasons as bits:
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
# An idle GPU, clocks that somebody has set, and sync boost are harmless. So is the software power cap (0x4): a GPU
# under full load runs there all the time. HW_SLOWDOWN (0x8) is also set while clocks change, so only its causes count.
_HARMFUL = {
    0x20: "it is too hot (software thermal slowdown)",
    0x40: "it is too hot (hardware thermal slowdown)",
    0x80: "its power supply demands it (hardware power brake)",
}
_POWER_CAP = 0x4
# A slowdown counts after so many samples, since one may be a spike.
_SAMPLES_IN_A_ROW = 2
# At most so many events are read in one sample.
_MOST_EVENTS = 100
_XID_TABLE = "https://docs.nvidia.com/deploy/xid-errors/"
Warn = Callable[[str, str], None]
CHECKPOINT_DISK = "checkpoint disk"
INSTALL = install_line("counters")
# A disk is nearly full at both limits. A large one has room for many checkpoints in its last percents.
_FULL_PERCENTAGE, _FULL_MEGABYTES = 95.0, 100e3
# A link at 200 Gb/s and more corrects errors all the time, and counts some. These are a fault only beyond ten (the
# thresholds of `ibqueryerrors`) and 120 an hour (the bit error rate that the InfiniBand specification allows, as
# NVIDIA's monitor takes it: https://github.com/NVIDIA/NVSentinel, docs/configuration/nic-health-monitor.md). Any other
# error is a fault at once.
_NOISY = {"symbol_error", "link_error_recovery", "port_rcv_errors"}
_NOISE, _NOISE_PER_HOUR = 10, 120
_LINK_ADVICE = (
    "Collectives slow down or fail when it goes on: check the nodes with `azureml-strategy doctor`, measure their "
    "links with `azureml-strategy bench --pairs`, and replace this one if it is slow"
)
_GPU_ADVICE = (
    "All ranks wait for the slowest GPU: check the node with `azureml-strategy doctor`, and replace it if that lasts"
)


class GPUCounters:
    """All GPUs of this node, by the driver's own numbers.

    MLflow's `GPUMonitor` has the same names for load, memory and power. It is not used, because it logs a warning in
    each sample for each value that a GPU (a slice of one, a virtual one) does not have.

    Raises:
        ImportError: nvidia-ml-py is not installed.
        pynvml.NVMLError: there is no driver, or it does not let this process ask.
    """

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        self._gpus = {index: pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())}
        self._slowdowns: dict[tuple[int, int], int] = {}
        self._memory_errors: dict[int, int] = {}
        self._events: Any = None
        with suppress(pynvml.NVMLError):  # a virtual GPU may have no events
            self._events = pynvml.nvmlEventSetCreate()
            for gpu in self._gpus.values():
                pynvml.nvmlDeviceRegisterEvents(gpu, pynvml.nvmlEventTypeXidCriticalError, self._events)

    def __len__(self) -> int:
        return len(self._gpus)

    def read(self, warn: Warn) -> dict[str, float]:
        """Read every GPU, and return figures by name, without `system/`.

        Values that the driver does not have or denies are left out. `warn` is called for each fault, see `NodeSampler`.
        """
        figures: dict[str, float] = {}
        for index, gpu in list(self._gpus.items()):
            try:
                for name, value in self._read_gpu(index, gpu, warn):
                    figures[f"gpu_{index}_{name}"] = round(value, 1)
            except self._nvml.NVMLError_GpuIsLost:
                del self._gpus[index]
                warn(f"gpu {index} lost", f"GPU {index} has gone: the driver says that it has fallen off the bus")
        self._read_events(warn)
        return figures

    def close(self) -> None:
        """Let go of the driver."""
        with suppress(self._nvml.NVMLError):
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()

    def _read_gpu(self, index: int, gpu: Any, warn: Warn) -> Iterator[tuple[str, float]]:
        nvml = self._nvml
        if (load := self._ask(nvml.nvmlDeviceGetUtilizationRates, gpu)) is not None:
            yield "utilization_percentage", load.gpu
        if (memory := self._ask(nvml.nvmlDeviceGetMemoryInfo, gpu)) is not None and memory.total:
            yield "memory_usage_percentage", 100 * memory.used / memory.total
            yield "memory_usage_megabytes", memory.used / 1e6
        if (milliwatts := self._ask(nvml.nvmlDeviceGetPowerUsage, gpu)) is not None:
            yield "power_usage_watts", milliwatts / 1000
            if limit := self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit, gpu):
                yield "power_usage_percentage", 100 * milliwatts / limit
        yield from self._read_clocks(index, gpu, warn)
        yield from self._read_memory_errors(index, gpu, warn)

    def _read_clocks(self, index: int, gpu: Any, warn: Warn) -> Iterator[tuple[str, float]]:
        nvml = self._nvml
        figures = {
            "sm_clock_megahertz": self._ask(nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_SM),
            "memory_clock_megahertz": self._ask(nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_MEM),
            "temperature_celsius": self._ask(nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU),
        }
        known = {name: value for name, value in figures.items() if value is not None}
        yield from known.items()
        # The new name of this call, ...ClocksEventReasons, is unknown to drivers before 535; new ones know both.
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu)
        if reasons is None:
            return
        yield "power_capped", float(bool(reasons & _POWER_CAP))
        yield "throttled", float(bool(reasons & sum(_HARMFUL)))
        now = ", ".join(f"{name} {value}" for name, value in known.items())
        for bit, why in _HARMFUL.items():
            samples = self._slowdowns.get((index, bit), 0) + 1 if reasons & bit else 0
            self._slowdowns[index, bit] = samples
            if samples >= _SAMPLES_IN_A_ROW:
                warn(f"gpu {index} slowdown {bit}", f"GPU {index} runs at lower clocks because {why}: {now}")

    def _read_memory_errors(self, index: int, gpu: Any, warn: Warn) -> Iterator[tuple[str, float]]:
        nvml = self._nvml
        kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC  # since the driver was loaded
        errors = self._ask(nvml.nvmlDeviceGetTotalEccErrors, gpu, *kind)
        if errors is None:
            return
        before = self._memory_errors.setdefault(index, errors)
        yield "uncorrectable_memory_errors", errors - before
        if errors > before:
            warn(f"gpu {index} memory", f"GPU {index} had {errors - before} uncorrectable memory error(s) (ECC)")

    def _read_events(self, warn: Warn) -> None:
        if self._events is None:
            return
        handles = {_address(gpu): index for index, gpu in self._gpus.items()}
        for _ in range(_MOST_EVENTS):
            try:
                event = self._nvml.nvmlEventSetWait(self._events, 0)
            except self._nvml.NVMLError:  # usually a time-out, since there is no event
                return
            index, xid = handles.get(_address(event.device), "?"), event.eventData
            warn(f"gpu {index} xid {xid}", f"GPU {index} reported Xid {xid}; {_XID_TABLE} says whose fault that is")

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call NVML. None if it has no answer, for example without support or permission."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError_GpuIsLost:
            raise
        except self._nvml.NVMLError:
            return None


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


class NodeSampler:
    """Takes samples of this node's counters. One thread creates and uses it.

    CPU, memory, disk and network have the names and units of MLflow's own monitors. Those are not used, because they
    import all of MLflow, which costs a process that logs nothing some eight seconds of a processor.

    Args:
        warn: called with a fault: the cause in a few words, and a text of one or two sentences. It is called in each
            sample for as long as the fault lasts.
        checkpoints: returns the folder of checkpoints; None if there is none, or it is no local path.
        sysfs: mount point of sysfs.

    Raises:
        ImportError: psutil is not installed.
    """

    def __init__(
        self, warn: Callable[[str, str], None], checkpoints: Callable[[], Path | None], sysfs: str | Path = "/sys"
    ) -> None:
        import psutil

        self._psutil = psutil
        self._warn = warn
        self._checkpoints = checkpoints
        self._sysfs = sysfs
        self._gpus = _gpus()
        self._started = self._sampled_at = time.monotonic()
        self._network = Growth()
        self._rates: dict[str, float] = {}
        self._sources: dict[str, Callable[[], dict[str, float]]] = {
            "CPU": self._cpu,
            "memory": self._memory,
            "disk": self._disk,
            "network": self._all_interfaces,
            "Ethernet interface": self._ethernet,
            "InfiniBand ports": self._infiniband,
            "disk of the checkpoints": self._checkpoint_disk,
            "GPUs": self._gpu,
        }
        self._unreadable: set[str] = set()
        self.sample()  # load and growth are measured from here on

    def sample(self) -> dict[str, float]:
        """Return the figures of now by name, without `system/`. What cannot be read is left out."""
        figures: dict[str, float] = {}
        now = time.monotonic()
        for name, source in self._sources.items():
            try:
                figures.update(source())
            except Exception as error:  # psutil and the kernel have many; the other sources go on
                if name not in self._unreadable:
                    rank_zero_info(f"Counters: the {name} cannot be read ({type(error).__name__}: {error}).")
                self._unreadable.add(name)
        figures.update(self._per_second(figures, now - self._sampled_at))
        self._sampled_at = now
        return figures

    def close(self) -> None:
        """Let go of the GPU driver."""
        if self._gpus is not None:
            self._gpus.close()

    def _cpu(self) -> dict[str, float]:
        return {"cpu_utilization_percentage": self._psutil.cpu_percent()}

    def _memory(self) -> dict[str, float]:
        memory = self._psutil.virtual_memory()
        return {
            "system_memory_usage_megabytes": round(memory.used / 1e6, 1),
            "system_memory_usage_percentage": round(100 * memory.used / memory.total, 1),
        }

    def _disk(self) -> dict[str, float]:
        disk = self._psutil.disk_usage("/")
        return {
            "disk_usage_percentage": disk.percent,
            "disk_usage_megabytes": round(disk.used / 1e6, 1),
            "disk_available_megabytes": round(disk.free / 1e6, 1),
        }

    def _checkpoint_disk(self) -> dict[str, float]:
        folder = self._checkpoints()
        if folder is None:
            return {}
        existing = next((each for each in (folder, *folder.parents) if each.exists()), None)
        if existing is None:
            return {}
        disk = self._psutil.disk_usage(str(existing))
        if not disk.total:  # some mounted storage does not know its size
            return {}
        free = disk.free / 1e6
        if is_nearly_full(disk.percent, free):
            self._warn(
                CHECKPOINT_DISK,
                f"the disk of the checkpoints, {folder}, is {disk.percent:.0f} % full: {free / 1e3:.1f} GB are left. A "
                "checkpoint that does not fit is not written: delete old runs, keep fewer checkpoints "
                "(`checkpoint.keep_last`, `checkpoint.save_top_k`), or write them to a larger mount (`output_dir`).",
            )
        return {
            "checkpoint_disk_usage_percentage": disk.percent,
            "checkpoint_disk_available_megabytes": round(free, 1),
        }

    def _all_interfaces(self) -> dict[str, float]:
        counters = self._psutil.net_io_counters()
        if counters is None:
            return {}
        self._network.update({("", "received"): counters.bytes_recv, ("", "sent"): counters.bytes_sent})
        return self._megabytes("network", "received", "sent")

    def _ethernet(self) -> dict[str, float]:
        self._network.update(read_ethernet_counters(self._sysfs))
        figures = self._megabytes("ethernet", "rx_bytes", "tx_bytes")
        errors = self._network.of("rx_errors", "tx_errors")
        return figures if errors is None else figures | {"ethernet_errors": errors}

    def _infiniband(self) -> dict[str, float]:
        self._network.update(read_infiniband_counters(self._sysfs))
        figures = self._megabytes("infiniband", RECEIVED, SENT, BYTES_PER_WORD)
        for name, counters in (("infiniband_errors", ERRORS), ("infiniband_link_downs", (LINK_DOWNED,))):
            if (count := self._network.of(*counters)) is not None:
                figures[name] = count
        noise = _NOISE + _NOISE_PER_HOUR * (time.monotonic() - self._started) / 3600
        for counter in (LINK_DOWNED, *ERRORS):
            tolerated = noise if counter in _NOISY else 0
            for port, count in self._network.by_port(counter).items():
                if count > tolerated:
                    text = f"the InfiniBand port {port} counted {count} {counter} since training started"
                    self._warn(f"infiniband {counter}", f"{text}. {_LINK_ADVICE}.")
        return figures

    def _megabytes(self, prefix: str, received: str, sent: str, unit: int = 1) -> dict[str, float]:
        counters = {f"{prefix}_receive_megabytes": received, f"{prefix}_transmit_megabytes": sent}
        found = {name: self._network.of(counter) for name, counter in counters.items()}
        return {name: round(unit * count / 1e6, 3) for name, count in found.items() if count is not None}

    def _per_second(self, figures: dict[str, float], seconds: float) -> Iterator[tuple[str, float]]:
        for name in ("infiniband_receive", "infiniband_transmit", "ethernet_receive", "ethernet_transmit"):
            if (megabytes := figures.get(f"{name}_megabytes")) is None:
                continue
            before = self._rates.get(name)
            self._rates[name] = megabytes
            if before is not None and seconds > 0:
                yield f"{name}_megabytes_per_second", round((megabytes - before) / seconds, 3)

    def _gpu(self) -> dict[str, float]:
        if self._gpus is None:
            return {}
        return self._gpus.read(lambda cause, text: self._warn(cause, f"{text}. {_GPU_ADVICE}."))


def is_nearly_full(percentage: float, free_megabytes: float) -> bool:
    """Whether a disk may not take another checkpoint."""
    return percentage >= _FULL_PERCENTAGE and free_megabytes < _FULL_MEGABYTES


def _gpus() -> GPUCounters | None:
    """The GPUs of NVIDIA's driver. None if it has none, with a sentence on the console if there should be some."""
    try:
        return GPUCounters()
    except Exception as error:  # without nvidia-ml-py there is no class of NVML's errors
        if read_gpus().vendor == "nvidia":
            what = INSTALL if isinstance(error, ImportError) else "see nvidia-smi"
            rank_zero_info(f"Counters of the GPUs are not recorded ({type(error).__name__}: {error}): {what}.")
        return None
