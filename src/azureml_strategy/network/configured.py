"""The NCCL settings that a user or an administrator has made already, and where."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from azureml_strategy.network.files import read_text

# Holds what an earlier plan of ours has set in this process or its parent, as JSON: these values are no user's.
PLANNED_VARIABLES = "AZUREML_STRATEGY_PLANNED"
_PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_")
_NAMES = ("CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING")


def configured_settings(
    environ: Mapping[str, str] | None = None, *, root: str | Path = "/", library: str = "nccl"
) -> dict[str, tuple[str, str]]:
    """Value and source of each variable about communication, as NCCL will see them.

    The environment wins over NCCL_CONF_FILE (else the home folder's file), and that over the one in /etc (NCCL user
    guide, "Environment Variables"; RCCL the same with names of its own).

    Args:
        environ: the environment; that of this process by default.
        root: the folder that holds `etc`.
        library: `nccl` or `rccl`.
    """
    environ = os.environ if environ is None else environ
    home = Path(environ.get("HOME", "/nonexistent")) / f".{library}.conf"
    files = [Path(root) / f"etc/{library}.conf", Path(environ.get("NCCL_CONF_FILE") or home)]
    settings = {name: (value, str(path)) for path in files for name, value in _read(path).items()}
    planned = planned_earlier(environ)
    given = {name: (value, "environment") for name, value in environ.items() if planned.get(name) != value}
    return {name: found for name, found in (settings | given).items() if _is_ours_to_read(name)}


def planned_earlier(environ: Mapping[str, str]) -> dict[str, str]:
    """What an earlier plan has set; nothing where the note was damaged."""
    try:
        noted = json.loads(environ.get(PLANNED_VARIABLES, "{}"))
    except ValueError:
        return {}
    return noted if isinstance(noted, dict) else {}


def _is_ours_to_read(name: str) -> bool:
    return name.startswith(_PREFIXES) or name in _NAMES


def _read(path: Path) -> dict[str, str]:
    """Lines of NAME=VALUE; `#` in the first column starts a comment, and blanks belong to the name and the value."""
    lines = (read_text(path) or "").split("\n")
    pairs = (line.partition("=") for line in lines if not line.startswith("#"))
    return {name: value for name, separator, value in pairs if separator}
