"""Plans the communication settings of a node, with a reason for each.

A value that the user or an NCCL configuration file has already set stays as it is.
"""

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
from azureml_strategy.inside import OutsideError, private_folder
from azureml_strategy.network.conflicts import find_conflicts
from azureml_strategy.network.findings import Finding, find_faults
from azureml_strategy.network.node import Node, read_node
from azureml_strategy.network.settings import Setting, wanted_settings
from azureml_strategy.network.sysfs import read_text

_PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_")
_NAMES = ("CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING")
# These say which library is installed, and where. The library reads none of them. NVIDIA's images set NCCL_VERSION, and
# whoever builds torch the others (its cmake/Modules/FindNCCL.cmake).
_OF_THE_BUILD = re.compile(
    r"(?:NCCL|RCCL|GLOO)_(?:VERSION|VER|HOME|PREFIX|DIR|PATH|LIBRARIES|(?:ROOT|INCLUDE|LIB|LIBRARY)(?:_DIRS?|_PATH)?)"
)

# The levels at which NCCL logs its transport.
_TELLING_LEVELS = ("INFO", "TRACE", "ABORT")
# Channel lines are logged under INIT and NET (NCCL's src/transport/net.cc).
_TELLING_SUBSYSTEMS = ("INIT", "NET", "ALL")
_REASON = "The transport is read back from NCCL's own log"
# One step of a large model has some hundred collectives; each entry takes some hundred bytes. Where torch records by
# default, it keeps as many.
_ENTRIES = 2000
_SOURCE = "PyTorch, ProcessGroupNCCL environment variables"


def configured_settings(
    environ: Mapping[str, str] | None = None, *, root: str | Path = "/", library: str = "nccl"
) -> dict[str, tuple[str, str]]:
    """Value and source of each variable about communication, as NCCL will see them.

    The environment wins over NCCL_CONF_FILE (or the home folder's file if that is not set), which wins over the file
    in /etc (NCCL user guide, "Environment Variables"). RCCL follows the same rules with its own file names. Values that
    an earlier plan has set are left out.

    Args:
        environ: environment variables; those of this process by default.
        root: the folder that holds `etc`.
        library: `nccl` or `rccl`.
    """
    environ = os.environ if environ is None else environ
    home = Path(environ.get("HOME", "/nonexistent")) / f".{library}.conf"
    files = [Path(root) / f"etc/{library}.conf", Path(environ.get("NCCL_CONF_FILE") or home)]
    settings = {name: (value, str(path)) for path in files for name, value in _read(path).items()}
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
        noted = json.loads(environ.get(PLANNED_VARIABLES, "{}"))
    except ValueError:
        return {}
    return noted if isinstance(noted, dict) else {}


def _read(path: Path) -> dict[str, str]:
    """Parse lines of NAME=VALUE. `#` in the first column starts a comment; blanks belong to the name and the value."""
    lines = (read_text(path) or "").split("\n")
    pairs = (line.partition("=") for line in lines if not line.startswith("#"))
    return {name: value for name, separator, value in pairs if separator}


def log_settings(configured: Mapping[str, tuple[str, str]], folder: Path) -> Iterator[Setting]:
    """Have NCCL write its log into a folder.

    A log level or log file that is already set stays as it is. The level INFO writes some hundred lines at the start.

    Args:
        configured: value and source of each variable, from `configured_settings`.
        folder: folder for the logs, one for each process.
    """
    if "NCCL_DEBUG" in configured:
        return
    yield Setting("NCCL_DEBUG", "INFO", f"{_REASON}.", "NVIDIA NCCL user guide, NCCL_DEBUG")
    if "NCCL_DEBUG_FILE" not in configured:
        path = str(folder / "nccl.%h.%p.log")
        yield Setting("NCCL_DEBUG_FILE", path, f"{_REASON}; %h is the host, %p the process.", "ditto, NCCL_DEBUG_FILE")


def own_log(variables: Mapping[str, str]) -> Path:
    """The file that NCCL writes its log to in this process.

    Args:
        variables: the variables that NCCL reads.

    Raises:
        LookupError: NCCL writes no log that can be read; the message says why, and what to do.
    """
    level, file = variables.get("NCCL_DEBUG", ""), variables.get("NCCL_DEBUG_FILE", "")
    if level.upper() not in _TELLING_LEVELS:
        raise LookupError(f"not known: NCCL_DEBUG={level} keeps NCCL from telling it. Remove NCCL_DEBUG.")
    subsystems = variables.get("NCCL_DEBUG_SUBSYS", "INIT").upper()
    # A leading `^` excludes the listed subsystems.
    if subsystems.startswith("^") == any(name in subsystems for name in _TELLING_SUBSYSTEMS):
        raise LookupError(f"not known: NCCL_DEBUG_SUBSYS={subsystems} leaves it out. Remove NCCL_DEBUG_SUBSYS.")
    if not file:
        raise LookupError(
            f"not known: NCCL_DEBUG={level} writes to standard output, which cannot be read back. Remove NCCL_DEBUG, "
            "or read the job's log with `azureml-strategy doctor --log FILE`."
        )
    host = socket.gethostname().partition(".")[0]  # as NCCL cuts it
    return Path(file.replace("%h", host).replace("%p", str(os.getpid())))


def log_folder(azure: bool) -> Path:
    """A folder for the NCCL logs of a job: `logs/nccl`, which Azure ML uploads meanwhile, or a temporary one.

    Args:
        azure: whether the machine is an Azure VM. Elsewhere, as under the emulator, nothing uploads logs.
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
    """Have torch record the last collectives, and NCCL's watchdog dump them when one times out.

    Older releases of torch record nothing by default, and only for NCCL. Newer releases have other variable names, and
    warn about the old ones.

    Args:
        configured: value and source of each variable, from `configured_settings`.
        folder: folder for the watchdog's dumps; None leaves them where torch puts them, in the node's /tmp.
    """
    from torch._C import _distributed_c10d

    new = hasattr(_distributed_c10d, "_dump_fr_trace")
    size, file = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE")
    old_size, old_file = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    if size not in configured and old_size not in configured:
        reason = f"torch remembers the last {_ENTRIES} collectives, by which a rank that hangs is found."
        yield Setting(size if new else old_size, str(_ENTRIES), reason, _SOURCE)
    if folder is None:
        return
    if "TORCH_NCCL_DUMP_ON_TIMEOUT" not in configured:
        reason = "NCCL's watchdog writes them down before it ends the process."
        yield Setting("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", reason, _SOURCE)
    if file not in configured and old_file not in configured:
        reason = "They must not go with the node, as /tmp does."
        yield Setting(file if new else old_file, str(folder / "flight_recorder.rank_"), reason, _SOURCE)


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
