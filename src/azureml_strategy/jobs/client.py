"""The way into a workspace: azure-ai-ml's client, signed in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.jobs.places import WorkspaceSettings, find_workspace
from azureml_strategy.jobs.quiet import import_azure, quiet_sdk

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

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
        DefaultAzureCredential(), found.subscription, found.resource_group, found.name, enable_telemetry=False
    )
