"""Reads the counters of this node: processors, memory, disks, network and GPUs, and tells what is wrong with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
from azureml_strategy.tracking.gpu_counters import GPUCounters

CHECKPOINT_DISK = "checkpoint disk"
INSTALL = install_line("counters")
# A disk is nearly full if both hold: a large one has room for many checkpoints in its last percents.
_FULL_PERCENTAGE, _FULL_MEGABYTES = 95.0, 100e3
# A link at 200 Gb/s and more corrects errors all the time, and counts some. These are errors if there are more than ten
# (the thresholds of `ibqueryerrors`) and 120 an hour (the bit error rate that the InfiniBand specification allows, as
# NVIDIA's monitor takes it: https://github.com/NVIDIA/NVSentinel, docs/configuration/nic-health-monitor.md). Any other
# error counts at once.
_NOISY = {"symbol_error", "link_error_recovery", "port_rcv_errors"}
_NOISE, _NOISE_PER_HOUR = 10, 120
_LINK_ADVICE = (
    "Collectives slow down or fail when it goes on: check the nodes with `azureml-strategy doctor`, measure their "
    "links with `azureml-strategy bench --pairs`, and replace this one if it is slow"
)
_GPU_ADVICE = (
    "All ranks wait for the slowest GPU: check the node with `azureml-strategy doctor`, and replace it if that lasts"
)


class NodeSampler:
    """Takes samples of this node's counters. One thread creates and uses it.

    CPU, memory, disk and network have the names and units of MLflow's own monitors. These are not used themselves, as
    they import all of MLflow, which costs a process that logs nothing some eight seconds of a processor.

    Args:
        warn: called with what is wrong: the cause in a few words, and a text of one or two sentences. It is called at
            each sample for as long as that lasts.
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
        self.sample()  # load and growth count from here

    def sample(self) -> dict[str, float]:
        """Return the figures of now by name, without `system/`. What cannot be read is left out."""
        figures: dict[str, float] = {}
        now = time.monotonic()
        for name, source in self._sources.items():
            try:
                figures.update(source())
            except Exception as error:  # psutil's and the kernel's are many; the other sources go on
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
        there = next((each for each in (folder, *folder.parents) if each.exists()), None)
        if there is None:
            return {}
        disk = self._psutil.disk_usage(str(there))
        if not disk.total:  # some mounted storage does not tell
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
    """The GPUs that NVIDIA's driver shows; None, with a sentence where there should be some."""
    try:
        return GPUCounters()
    except Exception as error:  # NVML's errors have no common base that is there without nvidia-ml-py
        if read_gpus().vendor == "nvidia":
            what = INSTALL if isinstance(error, ImportError) else "see nvidia-smi"
            rank_zero_info(f"Counters of the GPUs are not recorded ({type(error).__name__}: {error}): {what}.")
        return None
