"""Finds the workspace to use from what the user has typed and configured, and connects to it with azure-ai-ml."""

from __future__ import annotations

import configparser
import io
import json
import logging
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from datetime import timedelta
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.lazy import install_line

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.core.pipeline.policies import SansIOHTTPPolicy

log = logging.getLogger(__name__)

# First the variables that Azure ML sets in jobs and on compute instances, then those of Azure's tools and samples.
_VARIABLES = (
    ("AZUREML_ARM_SUBSCRIPTION", "AZUREML_ARM_RESOURCEGROUP", "AZUREML_ARM_WORKSPACE_NAME"),
    ("AZURE_SUBSCRIPTION_ID", "AZURE_RESOURCE_GROUP", "AZURE_ML_WORKSPACE"),
)
_CONFIG_FILES = (Path("config.json"), Path(".azureml/config.json"), Path("aml_config/config.json"))
_CONFIG_KEYS = ("subscription_id", "resource_group", "workspace_name")

# These loggers warn of what the user can do nothing about: experimental classes, a Studio link without a tenant, an
# absent credential of a chain. Real failures are raised as well.
_LOGGERS = ("azure.ai.ml", "azure.identity", "azure.core")
_RESOURCE_ID = re.compile(r"/subscriptions/[0-9a-f-]{36}/resourcegroups/[^/]+/providers/[\w.]+(?:/[^/]+/[^/]+)+", re.I)
_LONG_PAUSE_S = 60.0  # shorter pauses are not logged


@dataclass
class WorkspaceSettings:
    """The id of a subscription and the names of a resource group and a workspace, as far as they are known."""

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
    variables AZURE_SUBSCRIPTION_ID, AZURE_RESOURCE_GROUP and AZURE_ML_WORKSPACE, the defaults of the az command.

    If the user has typed no name of a workspace, the sources before the first one with a name are ignored. Otherwise
    its workspace would be looked for in the resource group of another. Later sources fill what is missing. A source
    that contradicts an earlier one is about another workspace, and is ignored. Only the subscription of the az command
    may always fill a missing one.

    Args:
        asked: what the user has typed.
        environ: environment variables; by default those of this process.
        folder: where the search for a configuration file starts; by default the working folder.

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


def quiet_sdk() -> None:
    """Import azure-ai-ml and silence the logs of it and of the Azure packages it depends on.

    Call this before any other import of an Azure package.

    Raises:
        JobError: the extra `azure` is not installed.
    """
    warnings.filterwarnings("ignore", module=r"azure\.ai\.ml")
    import_azure("azure.ai.ml")
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # On import, azure-ai-ml gives its logger and some child loggers their own levels and console handlers.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("azure.ai.ml") and isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.setLevel(logging.CRITICAL)


def import_azure(name: str) -> None:
    """Import a module of the extra `azure`.

    Raises:
        JobError: the extra is not installed.
    """
    try:
        import_module(name)
    except ImportError as error:
        raise JobError(f"What talks to Azure is not installed here ({error}). Type: {install_line('azure')}") from error


def as_yaml(entity: Any) -> str:
    """Write an entity as the YAML that `az ml ... create --file` and `azure.ai.ml.load_...` take."""
    text = io.StringIO()
    entity.dump(text)
    return text.getvalue()


def plain(value: object) -> str:
    """A state, a priority or another word of the service as text; azure-ai-ml gives some of them as an enumeration."""
    return str(value.value if isinstance(value, Enum) else value)


def check_resource_id(option: str, value: str | None) -> None:
    """Refuse the value of an option that is not a resource id; None passes.

    Raises:
        JobError: the value is not a resource id.
    """
    if value is not None and not _RESOURCE_ID.fullmatch(value):
        raise JobError(
            f"{option} {value} is no resource id. It is written "
            "/subscriptions/ID/resourceGroups/NAME/providers/KIND/TYPE/NAME: `az resource list --name NAME --query "
            "'[].id' -o tsv` shows it, and so does the resource's page in the portal."
        )


def connect(settings: WorkspaceSettings | None = None) -> MLClient:
    """Make a client for a workspace.

    azure-identity finds the credentials: variables, a managed identity or `az login`. No request is made yet.
    azure-core repeats failed requests, with the pauses that the service asks for.

    Args:
        settings: the parts of the workspace that the user has named; `find_workspace` completes them.

    Raises:
        JobError: no workspace is configured, or the extra `azure` is not installed.
    """
    quiet_sdk()
    import_azure("azure.identity")  # only this function needs it
    found = find_workspace(settings or WorkspaceSettings())
    from azure.ai.ml import MLClient
    from azure.identity import DefaultAzureCredential

    return MLClient(
        DefaultAzureCredential(),
        found.subscription,
        found.resource_group,
        found.name,
        enable_telemetry=False,
        per_retry_policies=[_long_pause_logger()],
    )


def _long_pause_logger() -> SansIOHTTPPolicy[Any, Any]:
    """A policy of azure-core's pipeline that logs when the service asks for a long pause, which azure-core obeys."""
    from azure.core.pipeline import PipelineRequest, PipelineResponse
    from azure.core.pipeline.policies import SansIOHTTPPolicy

    from azureml_strategy.jobs.azure_internals import get_retry_after

    class LongPauseLogger(SansIOHTTPPolicy[Any, Any]):
        def on_response(self, request: PipelineRequest[Any], response: PipelineResponse[Any, Any]) -> None:
            pause_s = get_retry_after(response) or 0
            if pause_s >= _LONG_PAUSE_S:
                log.warning(
                    "%s asks for a pause of %s (HTTP %d) before it is asked again; Ctrl-C ends the waiting.",
                    urlsplit(request.http_request.url).hostname,
                    timedelta(seconds=round(pause_s)),
                    response.http_response.status_code,
                )

    return LongPauseLogger()
