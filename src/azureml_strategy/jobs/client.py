"""The way into a workspace: azure-ai-ml's client, signed in."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from azureml_strategy.jobs.places import WorkspaceSettings, find_workspace
from azureml_strategy.jobs.quiet import import_azure, quiet_sdk

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.core.pipeline.policies import SansIOHTTPPolicy

__all__ = ["WorkspaceSettings", "connect"]

log = logging.getLogger(__name__)

_LONG_PAUSE_S = 60.0  # shorter ones are told by nobody


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
