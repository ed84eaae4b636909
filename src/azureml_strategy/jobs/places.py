"""Finds the workspace to use, from what the user has typed and configured."""

from __future__ import annotations

import configparser
import json
import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from azureml_strategy.jobs.service_errors import JobError

# First the variables that Azure ML sets in jobs and compute instances, then the names of Azure's tools and samples.
_VARIABLES = (
    ("AZUREML_ARM_SUBSCRIPTION", "AZUREML_ARM_RESOURCEGROUP", "AZUREML_ARM_WORKSPACE_NAME"),
    ("AZURE_SUBSCRIPTION_ID", "AZURE_RESOURCE_GROUP", "AZURE_ML_WORKSPACE"),
)
_CONFIG_FILES = (Path("config.json"), Path(".azureml/config.json"), Path("aml_config/config.json"))
_CONFIG_KEYS = ("subscription_id", "resource_group", "workspace_name")


@dataclass(frozen=True)
class WorkspaceSettings:
    """A workspace, or the known part of its address.

    Attributes:
        subscription: id of the subscription.
        resource_group: name of the resource group.
        name: name of the workspace.
    """

    subscription: str | None = None
    resource_group: str | None = None
    name: str | None = None

    def over(self, other: WorkspaceSettings) -> WorkspaceSettings:
        """These settings, with missing values taken from the other."""
        return WorkspaceSettings(*(mine or theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def contradicts(self, other: WorkspaceSettings) -> bool:
        """Whether both have the same value, and it differs."""
        return self.over(other) != other.over(self)


def find_workspace(
    asked: WorkspaceSettings, environ: Mapping[str, str] | None = None, folder: Path | None = None
) -> WorkspaceSettings:
    """Complete the workspace that the user has typed from the configured sources.

    The sources are, in this order: the variables of an Azure ML job, a `config.json` in the folder or above it, the
    variables AZURE_SUBSCRIPTION_ID, AZURE_RESOURCE_GROUP and AZURE_ML_WORKSPACE, the defaults of the az command. If
    the user has typed no workspace name, sources before the first one that names a workspace are ignored: its workspace
    must not be looked for in the resource group of another. Later sources fill what is missing, unless they contradict
    an earlier one, which makes theirs another workspace. The subscription of the az command fills any.

    Args:
        asked: what the user has typed.
        environ: environment variables; those of this process by default.
        folder: folder where the search for a configuration file starts; the working folder by default.

    Raises:
        JobError: a value is still missing, or a configuration file cannot be read.
    """
    environ = os.environ if environ is None else environ
    job, user = (WorkspaceSettings(*(environ.get(name) or None for name in names)) for names in _VARIABLES)
    az = _az_defaults(environ)
    sources = [job, _config_file((folder or Path.cwd()).absolute()), user, az]
    if asked.name is None:
        first = next((number for number, source in enumerate(sources) if source.name), 0)
        sources = sources[first:]
    configured = WorkspaceSettings()
    for source in (*sources, WorkspaceSettings(az.subscription)):
        if not configured.contradicts(source):
            configured = configured.over(source)
    found = asked.over(configured)
    missing = [field.name.replace("_", " ") for field in fields(found) if getattr(found, field.name) is None]
    if not missing:
        return found
    raise JobError(
        f"No workspace is configured: its {' and '.join(missing)} could not be found. Download config.json from the "
        "workspace's page in Azure ML Studio into this folder, or type --subscription, --resource-group and "
        "--workspace, or set AZURE_SUBSCRIPTION_ID, AZURE_RESOURCE_GROUP and AZURE_ML_WORKSPACE."
    )


def _config_file(folder: Path) -> WorkspaceSettings:
    """Read the nearest configuration file in this folder or above it, as Azure ML's own tools find it."""
    for each in (folder, *folder.parents):
        for name in _CONFIG_FILES:
            if (found := _read_config(each / name)) is not None:
                return found
    return WorkspaceSettings()


def _read_config(path: Path) -> WorkspaceSettings | None:
    """Read the workspace from a file; None if there is no file, or it is another program's `config.json`."""
    text = path.read_text(encoding="utf-8-sig", errors="replace") if path.is_file() else ""
    if f'"{_CONFIG_KEYS[-1]}"' not in text:
        return None
    try:
        content: Any = json.loads(text)
    except ValueError as error:
        raise JobError(f"{path} is no JSON document ({error}). Download it from Azure ML Studio anew.") from error
    return WorkspaceSettings(*(content.get(key) for key in _CONFIG_KEYS)) if isinstance(content, dict) else None


def _az_defaults(environ: Mapping[str, str]) -> WorkspaceSettings:
    """Read what `az account set` and `az configure --defaults group=... workspace=...` have stored."""
    folder = Path(environ.get("AZURE_CONFIG_DIR") or Path.home() / ".azure")
    settings = configparser.ConfigParser(interpolation=None)
    try:
        settings.read(folder / "config", encoding="utf-8-sig")
        profile = folder / "azureProfile.json"
        stored: Any = json.loads(profile.read_text(encoding="utf-8-sig")) if profile.is_file() else {}
        subscriptions = [each["id"] for each in stored.get("subscriptions", []) if each.get("isDefault")]
    except (configparser.Error, ValueError) as error:
        raise JobError(
            f"The az command's settings in {folder} cannot be read ({str(error).splitlines()[0]}). Have them written "
            "anew by `az login` and `az configure`, or let AZURE_CONFIG_DIR name another folder."
        ) from error
    group, workspace = (
        environ.get(f"AZURE_DEFAULTS_{name.upper()}") or settings.get("defaults", name, fallback=None)
        for name in ("group", "workspace")
    )
    return WorkspaceSettings(subscriptions[0] if subscriptions else None, group, workspace)
