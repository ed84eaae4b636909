"""Where a run is and how to look at it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from azureml_strategy.cluster.redaction import redact_text

# azureml://REGION.api.azureml.ms/mlflow/v1.0/subscriptions/S/resourceGroups/G/providers/.../workspaces/W
_WORKSPACE = re.compile(r"/resourcegroups/(?P<group>[^/?]+)/.*/workspaces/(?P<workspace>[^/?]+)", re.IGNORECASE)


@dataclass(frozen=True)
class RunLocation:
    """A run, in words fit to print: no credentials.

    Attributes:
        store: the tracking store.
        experiment: the experiment's name.
        run_id: the run's id.
        run_name: the run's name.
        open_with: a command or an address that shows the run.
    """

    store: str
    experiment: str
    run_id: str
    run_name: str
    open_with: str


def locate(tracking_uri: str, experiment: str, experiment_id: str, run_id: str, run_name: str) -> RunLocation:
    """Describe a run of a store."""
    store = describe_store(tracking_uri)
    open_with = _how_to_open(store, experiment_id, run_id)
    return RunLocation(store, experiment, run_id, run_name, open_with)


def describe_store(tracking_uri: str) -> str:
    """A store's address without secrets; a SQLite file is named relative to where training ran, here in full."""
    prefix, path = "sqlite:///", tracking_uri.removeprefix("sqlite:///")
    return redact_text(f"{prefix}{Path(path).absolute()}" if tracking_uri.startswith(prefix) else tracking_uri)


def _how_to_open(store: str, experiment_id: str, run_id: str) -> str:
    if store.startswith("azureml:"):
        found = _WORKSPACE.search(store)
        where = f" --resource-group {found['group']} --workspace-name {found['workspace']}" if found else ""
        return f"az ml job show --name {run_id}{where} --web"
    if store.startswith(("http://", "https://")):
        return f"{store.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"
    return f"mlflow ui --backend-store-uri {shlex.quote(store)}"
