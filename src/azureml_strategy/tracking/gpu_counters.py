"""Reads what the NVIDIA driver knows about the GPUs of a node: load, memory, power, clocks, and what is wrong."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

# Reasons for low clocks that are a fault, with an explanation. NVML gives the reasons as bits:
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
# Harmless are an idle GPU, clocks that somebody has set, sync boost, and the software power cap (0x4), at which a GPU
# under full load runs all the time. HW_SLOWDOWN (0x8) is also set while clocks change, so only its two causes count.
_HARMFUL = {
    0x20: "it is too hot (software thermal slowdown)",
    0x40: "it is too hot (hardware thermal slowdown)",
    0x80: "its power supply demands it (hardware power brake)",
}
_POWER_CAP = 0x4
# A slowdown of one sample may be a spike.
_SAMPLES_IN_A_ROW = 2
# The number of events that are read between two samples at most.
_MOST_EVENTS = 100
_XID_TABLE = "https://docs.nvidia.com/deploy/xid-errors/"

Warn = Callable[[str, str], None]


class GPUCounters:
    """The GPUs of this node, by the driver's own numbers, whichever of them this job uses.

    MLflow's `GPUMonitor` has the same names for load, memory and power. It is not used, as it logs a warning in each
    sample for each value that a GPU (a slice of one, a virtual one) does not have.

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

        Values that the driver does not have, or denies, are left out. For each fault it calls `warn` with the cause in
        a few words, and a text.
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
            seen = self._slowdowns.get((index, bit), 0) + 1 if reasons & bit else 0
            self._slowdowns[index, bit] = seen
            if seen >= _SAMPLES_IN_A_ROW:
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
            except self._nvml.NVMLError:  # mostly a time-out: there is none
                return
            index, xid = handles.get(_address(event.device), "?"), event.eventData
            warn(f"gpu {index} xid {xid}", f"GPU {index} reported Xid {xid}; {_XID_TABLE} says whose fault that is")

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call NVML; None if it has no answer, such as for want of support, permission or time."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError_GpuIsLost:
            raise
        except self._nvml.NVMLError:
            return None


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
