"""The connection to a workspace by azure-ai-ml, kept quiet, and its entities as text."""

from __future__ import annotations

import io
import logging
import re
import warnings
from datetime import timedelta
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from azureml_strategy.jobs.places import WorkspaceSettings, find_workspace
from azureml_strategy.jobs.service_errors import JobError

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.core.pipeline.policies import SansIOHTTPPolicy


# Marks of experimental classes, that a Studio link has no tenant, that a credential of a chain was not there: each is
# logged as a warning, and none of it is anything that the user could change. What went wrong is raised as well.
_LOGGERS = ("azure.ai.ml", "azure.identity", "azure.core")

_RESOURCE_ID = re.compile(r"/subscriptions/[0-9a-f-]{36}/resourcegroups/[^/]+/providers/[\w.]+(?:/[^/]+/[^/]+)+", re.I)
log = logging.getLogger(__name__)
_LONG_PAUSE_S = 60.0  # shorter ones are told by nobody


def quiet_sdk() -> None:
    """Import azure-ai-ml so that it, and what it stands on, logs nothing.

    Whatever leads to Azure passes here before it imports anything else of Azure's.

    Raises:
        JobError: the extra `azure` is not installed.
    """
    warnings.filterwarnings("ignore", module=r"azure\.ai\.ml")
    import_azure("azure.ai.ml")
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # On import it gives itself, and some loggers below, a level and a way to the screen of their own.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("azure.ai.ml") and isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.setLevel(logging.CRITICAL)


def import_azure(name: str) -> None:
    """Import a module of the extra `azure`.

    Raises:
        JobError: it is not installed.
    """
    try:
        import_module(name)
    except ImportError as error:
        raise JobError(
            f"What talks to Azure is not installed here ({error}). Type: pip install 'azureml-strategy[azure]'"
        ) from error


def as_yaml(entity: Any) -> str:
    """What `az ml ... create --file` takes.

    Args:
        entity: any of `azure.ai.ml.entities` that has `dump`.

    Returns:
        YAML that the entity's `azure.ai.ml.load_...` function reads back.
    """
    text = io.StringIO()
    entity.dump(text)
    return text.getvalue()


def plain(value: object) -> str:
    """A state, a priority or another word of the service, whether azure-ai-ml gives it as text or as an enumeration."""
    return str(value.value if isinstance(value, Enum) else value)


def check_resource_id(option: str, value: str | None) -> None:
    """Refuse a name where an id is needed.

    Args:
        option: what was typed before it.
        value: what was typed; None is none.

    Raises:
        JobError: it is no id of a resource.
    """
    if value is not None and not _RESOURCE_ID.fullmatch(value):
        raise JobError(
            f"{option} {value} is no resource id. It is written "
            "/subscriptions/ID/resourceGroups/NAME/providers/KIND/TYPE/NAME: `az resource list --name NAME --query "
            "'[].id' -o tsv` shows it, and so does the resource's page in the portal."
        )


__all__ = ["WorkspaceSettings", "connect"]


def connect(settings: WorkspaceSettings | None = None) -> MLClient:
    """A client for a workspace, signed in by whatever azure-identity finds: variables, managed identity, `az login`.

    No request is made yet. Failed requests are repeated by azure-core, with the pauses that the service asks for.

    Args:
        settings: the workspace as far as the user has named it; `find_workspace` tells where the rest comes from.

    Raises:
        JobError: no workspace is configured, or the extra `azure` is not installed.
    """
    quiet_sdk()
    import_azure("azure.identity")  # which only this needs
    found = find_workspace(settings or WorkspaceSettings())
    from azure.ai.ml import MLClient
    from azure.identity import DefaultAzureCredential

    return MLClient(
        DefaultAzureCredential(),
        found.subscription,
        found.resource_group,
        found.name,
        enable_telemetry=False,
        per_retry_policies=[_waits_told()],
    )


def _waits_told() -> SansIOHTTPPolicy[Any, Any]:
    """Part of azure-core's pipeline that says when the service asks for a long pause, which azure-core keeps."""
    from azure.core.pipeline import PipelineRequest, PipelineResponse
    from azure.core.pipeline.policies import SansIOHTTPPolicy
    from azure.core.pipeline.policies._utils import get_retry_after

    class WaitsTold(SansIOHTTPPolicy[Any, Any]):
        def on_response(self, request: PipelineRequest[Any], response: PipelineResponse[Any, Any]) -> None:
            pause_s = get_retry_after(response) or 0
            if pause_s >= _LONG_PAUSE_S:
                status = response.http_response.status_code
                log.warning(
                    "%s asks for a pause of %s (HTTP %d) before it is asked again; Ctrl-C ends the waiting.",
                    urlsplit(request.http_request.url).hostname,
                    timedelta(seconds=round(pause_s)),
                    status,
                )

    return WaitsTold()
