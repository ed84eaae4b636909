"""Chooses the NCCL settings that fit the hardware of a node, and plans them with a reason for each."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from azureml_strategy.cluster.environ import PLANNED_VARIABLES, copied
from azureml_strategy.files import OutsideError, private_folder
from azureml_strategy.network.conflicts import find_conflicts, hca_list
from azureml_strategy.network.findings import Finding, find_faults
from azureml_strategy.network.node import Node, read_node
from azureml_strategy.network.sysfs import read_text

_IMAGES = "Azure/azhpc-images, components/customizations"
_HEALTH_CHECKS = "Azure/azurehpc-health-checks, environment of the all-reduce test"
_INFRASTRUCTURE = "Azure/ai-infrastructure-on-azure, NCCL configurations"

# From HDR (200 Gb/s) on, a VM's PCIe path limits an adapter that must keep its writes in order.
_RELAXED_FROM_GBPS = 200
_GRACE_BLACKWELL = ("GB200", "GB300")
_HOPPER_AND_LATER = ("H100", "H200", *_GRACE_BLACKWELL)
_PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_")
_NAMES = ("CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING")
# These say which library is installed, and where. The library reads none of them. NVIDIA's images set NCCL_VERSION, and
# builds of torch set the others (its cmake/Modules/FindNCCL.cmake).
_OF_THE_BUILD = re.compile(
    r"(?:NCCL|RCCL|GLOO)_(?:VERSION|VER|HOME|PREFIX|DIR|PATH|LIBRARIES|(?:ROOT|INCLUDE|LIB|LIBRARY)(?:_DIRS?|_PATH)?)"
)

# The levels at which NCCL logs its transport.
_LOGGING_LEVELS = ("INFO", "TRACE", "ABORT")
# Channel lines are logged under INIT and NET (NCCL's src/transport/net.cc).
_LOGGING_SUBSYSTEMS = ("INIT", "NET", "ALL")
_LOG_REASON = "The transport is read back from NCCL's own log"
# One step of a large model has some hundred collectives; each entry takes some hundred bytes. Where torch records by
# default, it keeps as many.
_RECORDED_COLLECTIVES = 2000
_RECORDER_SOURCE = "PyTorch, ProcessGroupNCCL environment variables"


@dataclass(frozen=True)
class Setting:
    """One environment variable.

    Attributes:
        variable: name of the variable.
        value: value of the variable.
        reason: why it has this value.
        source: origin of the advice, or of a value that was already set.
    """

    variable: str
    value: str
    reason: str
    source: str


def wanted_settings(node: Node, num_nodes: int) -> Iterator[Setting]:
    """The settings that fit a node, regardless of what the user has set."""
    yield from _sockets(node, num_nodes)
    if node.usable_hcas:
        yield from _adapters(node)
        yield from _gpudirect(node)
        yield from _connections(node, num_nodes)
    else:
        yield from _no_adapters(node)
    yield from _topology(node)
    yield from _grace_blackwell(node)


def _sockets(node: Node, num_nodes: int) -> Iterator[Setting]:
    interface = node.bootstrap
    if interface is None:
        return
    yield Setting(
        "NCCL_SOCKET_IFNAME",
        interface.name,
        "Nodes meet over this interface. NCCL would prefer one called ib*, IP over InfiniBand, which need not be up.",
        _HEALTH_CHECKS,
    )
    if num_nodes > 1:
        yield Setting(
            "GLOO_SOCKET_IFNAME",
            interface.name,
            "gloo takes the address that the host's name resolves to, which may be 127.0.0.1 in a container.",
            "PyTorch, torch.distributed, choosing the network interface",
        )


def _adapters(node: Node) -> Iterator[Setting]:
    usable = node.usable_hcas
    others = [hca.name for hca in node.hcas if not hca.usable]
    left_out = f"; left out: {', '.join(others)}" if others else ""
    yield Setting(
        "NCCL_IB_HCA",
        hca_list(usable),
        f"Exactly the {len(usable)} InfiniBand port(s) that are active and joined{left_out}.",
        "sysfs of this node",
    )
    pkeys = {hca.full_pkey for hca in usable}
    if len(pkeys) == 1 and pkeys != {0}:
        reason = "The first partition key with full membership is not at index 0."
        yield Setting("NCCL_IB_PKEY", str(pkeys.pop()), reason, "sysfs of this node")


def _gpudirect(node: Node) -> Iterator[Setting]:
    fastest = max(hca.rate_gbps or 0 for hca in node.usable_hcas)
    if not node.virtual or fastest < _RELAXED_FROM_GBPS:
        return
    reason = "In a VM, PCIe writes of an adapter to GPU memory are slow unless they may overtake one another."
    yield Setting("NCCL_IB_PCI_RELAXED_ORDERING", "1", reason, _IMAGES)
    if node.gpudirect and node.topology_file is None and not node.default_topology:
        grace = node.vm_size is not None and node.vm_size.gpu_model in _GRACE_BLACKWELL
        yield Setting(
            "NCCL_NET_GDR_LEVEL",
            "PHB" if grace else "SYS",
            "No topology file is on this node, so every GPU looks far from every adapter, and NCCL would not use "
            "GPUDirect RDMA.",
            _INFRASTRUCTURE if grace else "Azure/aks-rdma-infiniband, pull request 36",
        )


def _connections(node: Node, num_nodes: int) -> Iterator[Setting]:
    if num_nodes > 1 and node.vm_size and node.vm_size.gpu_model in _HOPPER_AND_LATER:
        reason = "Several queue pairs take several paths through the fabric, where one may meet a busy link."
        yield Setting("NCCL_IB_QPS_PER_CONNECTION", "4", reason, _INFRASTRUCTURE)


def _no_adapters(node: Node) -> Iterator[Setting]:
    ethernet = [hca.name for hca in node.hcas if hca.is_ethernet]
    if ethernet and node.virtual:  # a machine outside Azure may use RoCE on purpose
        reason = f"Accelerated networking ({', '.join(ethernet)}) is no InfiniBand; NCCL would run RoCE over it."
    elif node.vm_size is not None and not node.vm_size.infiniband:
        reason = f"{node.vm_size.name} has no InfiniBand."
    else:
        return
    yield Setting("NCCL_IB_DISABLE", "1", reason, "NVIDIA/nccl issue 1101; Azure/azurehpc")


def _topology(node: Node) -> Iterator[Setting]:
    # NCCL_GRAPH_FILE stays unset, although the image of NC96ads_A100_v4 sets it: that file is for a group of all four
    # GPUs, and NCCL fails in a smaller one (azurehpc pull request 730; nccl issues 1008 and 1240). It gains nothing.
    if node.topology_file is None or node.vm_size is None:
        return
    reason = "The VM hides its PCIe tree; the file says which GPU and which adapter are near each other."
    yield Setting("NCCL_TOPO_FILE", str(node.topology_file), reason, _IMAGES)
    reason = "The topology file's NUMA nodes count, not the process's CPU mask."
    yield Setting("NCCL_IGNORE_CPU_AFFINITY", "1", reason, _IMAGES)
    reason = "The topology file lists GPUs in the order of the bus."
    yield Setting("CUDA_DEVICE_ORDER", "PCI_BUS_ID", reason, _HEALTH_CHECKS)


def _grace_blackwell(node: Node) -> Iterator[Setting]:
    if node.vm_size is None or node.vm_size.gpu_model not in _GRACE_BLACKWELL:
        return
    model = node.vm_size.gpu_model
    if node.usable_hcas:
        reason = f"Azure's configuration of {model} racks has NCCL use this service level of the fabric."
        yield Setting("NCCL_IB_SL", "1", reason, _INFRASTRUCTURE)
    for variable, value, reason in (
        ("NCCL_MNNVL_ENABLE", "1", f"The GPUs of a {model} rack share one NVLink domain across VMs."),
        ("NCCL_NVLS_ENABLE", "1", "The NVLink switches reduce by themselves."),
        ("NCCL_DMABUF_ENABLE", "1", "GPUDirect RDMA works by DMA-BUF here."),
        ("NCCL_NET_GDR_C2C", "1", "Adapters reach GPU memory through the CPU's NVLink-C2C."),
        ("NCCL_SHM_DISABLE", "1", "GPUs of one VM talk over NVLink, not through the host's memory."),
    ):
        yield Setting(variable, value, reason, _INFRASTRUCTURE)


def configured_settings(
    environ: Mapping[str, str] | None = None, *, root: str | Path = "/", library: str = "nccl"
) -> dict[str, tuple[str, str]]:
    """Value and source of each variable about communication, as NCCL or RCCL will see them.

    The environment wins over NCCL_CONF_FILE (or the home folder's file if that is not set), which wins over the file
    in /etc (NCCL user guide, "Environment Variables"). RCCL follows the same rules with its own file names. Values that
    an earlier plan has set are left out.
    """
    environ = os.environ if environ is None else environ
    home = Path(environ.get("HOME", "/nonexistent")) / f".{library}.conf"
    files = [Path(root) / f"etc/{library}.conf", Path(environ.get("NCCL_CONF_FILE") or home)]
    settings = {name: (value, str(path)) for path in files for name, value in _read(path)}
    planned = planned_before(environ)
    given = {name: (value, "environment") for name, value in copied(environ).items() if planned.get(name) != value}
    return {
        name: found
        for name, found in (settings | given).items()
        if name in _NAMES or (name.startswith(_PREFIXES) and not _OF_THE_BUILD.fullmatch(name))
    }


def planned_before(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that an earlier plan has set; empty if their record is damaged."""
    try:
        recorded = json.loads(environ.get(PLANNED_VARIABLES, "{}"))
    except ValueError:
        return {}
    return recorded if isinstance(recorded, dict) else {}


def _read(path: Path) -> Iterator[tuple[str, str]]:
    """Parse lines of NAME=VALUE. `#` in the first column starts a comment; blanks belong to the name and the value."""
    for line in (read_text(path) or "").split("\n"):
        name, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            yield name, value


def log_settings(configured: Mapping[str, tuple[str, str]], folder: Path) -> Iterator[Setting]:
    """Have NCCL write its log into a folder, a file for each process, unless `configured_settings` say otherwise.

    The level INFO writes some hundred lines at the start.
    """
    if "NCCL_DEBUG" in configured:
        return
    yield Setting("NCCL_DEBUG", "INFO", f"{_LOG_REASON}.", "NVIDIA NCCL user guide, NCCL_DEBUG")
    if "NCCL_DEBUG_FILE" not in configured:
        path = str(folder / "nccl.%h.%p.log")
        yield Setting(
            "NCCL_DEBUG_FILE", path, f"{_LOG_REASON}; %h is the host, %p the process.", "ditto, NCCL_DEBUG_FILE"
        )


def own_log(variables: Mapping[str, str]) -> Path:
    """The file that NCCL, which reads these variables, writes its log to in this process.

    Raises:
        LookupError: NCCL writes no log that can be read; the message says why, and what to do.
    """
    level, file = variables.get("NCCL_DEBUG", ""), variables.get("NCCL_DEBUG_FILE", "")
    if level.upper() not in _LOGGING_LEVELS:
        raise LookupError(f"not known: NCCL_DEBUG={level} keeps NCCL from telling it. Remove NCCL_DEBUG.")
    subsystems = variables.get("NCCL_DEBUG_SUBSYS", "INIT").upper()
    # A leading `^` excludes the listed subsystems.
    if subsystems.startswith("^") == any(name in subsystems for name in _LOGGING_SUBSYSTEMS):
        raise LookupError(f"not known: NCCL_DEBUG_SUBSYS={subsystems} leaves it out. Remove NCCL_DEBUG_SUBSYS.")
    if not file:
        raise LookupError(
            f"not known: NCCL_DEBUG={level} writes to standard output, which cannot be read back. Remove NCCL_DEBUG, "
            "or read the job's log with `azureml-strategy doctor --log FILE`."
        )
    host = socket.gethostname().partition(".")[0]  # as NCCL cuts it
    return Path(file.replace("%h", host).replace("%p", str(os.getpid())))


def log_folder(azure: bool) -> Path:
    """A folder for the NCCL logs of a job: `logs/nccl` on an Azure VM, where Azure ML uploads it; else a temporary one.

    Outside Azure, as under the emulator, nothing uploads logs.
    """
    if azure:
        folder = Path("logs/nccl").resolve()
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    # Named by the user: NCCL writes to what lies there, and another user could have put a link.
    temporary = Path(tempfile.gettempdir()) / f"azureml_strategy_nccl_{os.getuid()}"
    try:
        return private_folder(temporary)
    except (FileExistsError, OutsideError):
        return Path(tempfile.mkdtemp(prefix="azureml_strategy_nccl_"))
    except OSError:
        return temporary


def recorder_settings(configured: Mapping[str, tuple[str, str]], folder: Path | None) -> Iterator[Setting]:
    """Have torch record the last collectives, and NCCL's watchdog dump them into a folder when one times out.

    Without a folder, dumps stay where torch puts them, in the node's /tmp. What `configured_settings` name stays as it
    is. Older releases of torch record nothing by default, and only for NCCL. Newer releases have other variable names,
    and warn about the old ones.
    """
    from torch._C import _distributed_c10d

    new = hasattr(_distributed_c10d, "_dump_fr_trace")
    size, file = "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"
    old_size, old_file = "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    if size not in configured and old_size not in configured:
        reason = f"torch remembers the last {_RECORDED_COLLECTIVES} collectives, by which a rank that hangs is found."
        yield Setting(size if new else old_size, str(_RECORDED_COLLECTIVES), reason, _RECORDER_SOURCE)
    if folder is None:
        return
    if "TORCH_NCCL_DUMP_ON_TIMEOUT" not in configured:
        reason = "NCCL's watchdog writes them down before it ends the process."
        yield Setting("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", reason, _RECORDER_SOURCE)
    if file not in configured and old_file not in configured:
        reason = "They must not go with the node, as /tmp does."
        yield Setting(file if new else old_file, str(folder / "flight_recorder.rank_"), reason, _RECORDER_SOURCE)


@dataclass(frozen=True)
class NetworkPlan:
    """Settings for one node, with the findings that led to them.

    Attributes:
        settings: variables to set, without those that are already set.
        kept: variables about communication that the user or the machine has already set; their values win.
        findings: faults of the hardware, and values that contradict the hardware.
        infiniband: whether the hardware and these settings let NCCL use InfiniBand.
    """

    settings: tuple[Setting, ...]
    kept: tuple[Setting, ...]
    findings: tuple[Finding, ...]
    infiniband: bool

    @property
    def variables(self) -> dict[str, str]:
        """Name and value of each variable to set."""
        return {setting.variable: setting.value for setting in self.settings}

    @property
    def effective(self) -> dict[str, str]:
        """Name and value of each variable once the plan is applied."""
        return {setting.variable: setting.value for setting in (*self.kept, *self.settings)}

    def for_gloo(self) -> NetworkPlan:
        """The part of the plan that concerns gloo, which cannot use InfiniBand."""
        settings = tuple(setting for setting in self.settings if setting.variable.startswith("GLOO_"))
        kept = tuple(setting for setting in self.kept if setting.variable.startswith("GLOO_"))
        findings = tuple(finding for finding in self.findings if finding.subject.startswith("GLOO_"))
        return NetworkPlan(settings, kept, findings, infiniband=False)

    def including(self, settings: Iterable[Setting]) -> NetworkPlan:
        """The same plan, with more settings."""
        return replace(self, settings=(*self.settings, *settings))

    def without(self, variable: str) -> NetworkPlan:
        """The same plan, without the setting of one variable."""
        return replace(self, settings=tuple(each for each in self.settings if each.variable != variable))

    def apply(self, environ: MutableMapping[str, str] | None = None) -> None:
        """Set the variables, and record them so that a later plan does not take them for the user's.

        Args:
            environ: environment to change; that of this process by default.
        """
        environ = os.environ if environ is None else environ
        if not self.settings:
            return
        environ[PLANNED_VARIABLES] = json.dumps(planned_before(environ) | self.variables)
        environ.update(self.variables)


def plan_nccl(
    node: Node | None = None,
    *,
    num_nodes: int = 1,
    log_folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
    root: str | Path = "/",
) -> NetworkPlan:
    """Plan the settings for a node. Nothing changes until the plan is applied.

    A value that the user has set, in the environment or in a file that NCCL reads, always wins. If it contradicts the
    hardware, a finding says what that costs.

    Args:
        node: facts about the node; read from this machine by default.
        num_nodes: number of nodes of the job.
        log_folder: folder for NCCL's log, from which the transport is read back; None leaves the log settings alone.
        environ: environment variables; those of this process by default.
        root: the folder that holds `etc`, where NCCL's configuration file is.
    """
    node = read_node(root, environ) if node is None else node
    library = "rccl" if node.gpus.vendor == "amd" else "nccl"
    configured = configured_settings(environ, root=root, library=library)
    wanted = [*wanted_settings(node, num_nodes), *(log_settings(configured, log_folder) if log_folder else ())]
    if "NCCL_IB_HCA" in configured:  # a user who names an adapter wants it, even for RoCE
        wanted = [setting for setting in wanted if setting.variable != "NCCL_IB_DISABLE"]
    conflicts = tuple(find_conflicts(node, configured, num_nodes))
    switched_off = any(each.verdict == "problem" and each.subject.startswith("NCCL_") for each in conflicts)
    return NetworkPlan(
        settings=tuple(setting for setting in wanted if setting.variable not in configured),
        kept=tuple(Setting(name, value, "set already", source) for name, (value, source) in configured.items()),
        findings=(*find_faults(node), *conflicts),
        infiniband=bool(node.usable_hcas) and not switched_off,
    )
