"""Connects to a workspace with azure-ai-ml, silences that package's logs, and writes its entities as text."""

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
from azureml_strategy.lazy import install_line

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.core.pipeline.policies import SansIOHTTPPolicy


# They log warnings that the user can do nothing about: experimental classes, a Studio link without a tenant, an absent
# credential of a chain. Real failures are raised as well.
_LOGGERS = ("azure.ai.ml", "azure.identity", "azure.core")

_RESOURCE_ID = re.compile(r"/subscriptions/[0-9a-f-]{36}/resourcegroups/[^/]+/providers/[\w.]+(?:/[^/]+/[^/]+)+", re.I)
log = logging.getLogger(__name__)
_LONG_PAUSE_S = 60.0  # shorter pauses are not logged


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
    """Write an entity as the YAML that `az ml ... create --file` takes.

    Args:
        entity: any of `azure.ai.ml.entities` that has `dump`.

    Returns:
        YAML that the entity's `azure.ai.ml.load_...` function reads back.
    """
    text = io.StringIO()
    entity.dump(text)
    return text.getvalue()


def plain(value: object) -> str:
    """A state, a priority or another word of the service as text; azure-ai-ml gives some of them as an enumeration."""
    return str(value.value if isinstance(value, Enum) else value)


def check_resource_id(option: str, value: str | None) -> None:
    """Refuse a value that is not a resource id.

    Args:
        option: the option that has the value, for the message.
        value: the value that the user typed. None passes.

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
