"""Where NCCL writes its log, so that the transport can be read back from it."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from azureml_strategy.network.settings import Setting

# NCCL tells its transport from this level on.
_TELLING_LEVELS = ("INFO", "TRACE", "ABORT")
# Channel lines are logged under INIT and NET (NCCL's src/transport/net.cc).
_TELLING_SUBSYSTEMS = ("INIT", "NET", "ALL")
_REASON = "The transport is read back from NCCL's own log"


def log_settings(configured: Mapping[str, tuple[str, str]], folder: Path) -> Iterator[Setting]:
    """Have NCCL write its log into a folder, unless the user wants it elsewhere.

    A log level or a file that is set already stays as it is. The level INFO costs some hundred lines at the start.

    Args:
        configured: value and source of each variable, from `configured_settings`.
        folder: for the logs, one for each process.
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
        variables: what NCCL reads.

    Raises:
        LookupError: there will be none to read; the text says why, and what to do.
    """
    level, file = variables.get("NCCL_DEBUG", ""), variables.get("NCCL_DEBUG_FILE", "")
    if level.upper() not in _TELLING_LEVELS:
        raise LookupError(f"not known: NCCL_DEBUG={level} keeps NCCL from telling it. Remove NCCL_DEBUG.")
    subsystems = variables.get("NCCL_DEBUG_SUBSYS", "INIT").upper()
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
    """A folder for NCCL's logs: in an Azure ML job `logs/nccl`, which is uploaded while the job runs."""
    temporary = Path(tempfile.gettempdir()) / "azureml_strategy_nccl"
    for folder in [Path("logs/nccl").resolve()] * azure + [temporary]:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    return temporary
