"""The workspace's data plane: discovery, run history, and where a run's outputs lie."""

from __future__ import annotations

from typing import Any

from tests.jobs.azure_service.blobs import SUFFIX, Blobs
from tests.jobs.azure_service.exchange import Reply, Request, error
from tests.jobs.azure_service.jobs import Job
from tests.jobs.azure_service.workspace import ACCOUNT, Workspace

_ARTIFACTS = "ExperimentRun/dcid.{}/"


def answer(request: Request, workspace: Workspace, blobs: Blobs) -> Reply:
    """Answer a request to `REGION.api.azureml.ms`."""
    if request.path == "/discovery":
        return Reply(dict.fromkeys(("api", "history", "mlflow"), f"https://{request.host}"))
    asked = request.path.partition(f"/workspaces/{workspace.name}/")[2]
    if asked == "rundata":
        job = workspace.jobs[request.json["runId"]]
        outputs = {name: {"assetId": f"{job.name}:{name}", "type": "uri_folder"} for name in _output_uris(job)}
        return Reply({"runMetadata": {"runId": job.name, "outputs": outputs}})
    if asked.startswith("dataversion/"):
        return Reply({"values": {identity: _resolved(workspace, identity) for identity in request.json["values"]}})
    _, name, *what = asked.split("/")
    if name not in workspace.jobs:
        return error(404, "UserError", f"Run {name} was not found.")
    return Reply(_details(workspace.jobs[name], blobs) if what == ["details"] else {"runId": name})


def log_key(job: str, name: str) -> str:
    """Where a log lies in Blob Storage."""
    return f"{ACCOUNT}/azureml/{_ARTIFACTS.format(job)}{name}"


def output_key(job: str, output: str, name: str) -> str:
    """Where a file of an output without a path of its own lies."""
    return f"{ACCOUNT}/blobstore/azureml/{job}/{output}/{name}"


def _details(job: Job, blobs: Blobs) -> dict[str, Any]:
    prefix = log_key(job.name, "")
    state = job.next_state()
    logs = {
        key.removeprefix(prefix): f"https://{ACCOUNT}{SUFFIX}{key.removeprefix(ACCOUNT)}?sig=the-signature"
        for key in blobs.content
        if key.startswith(prefix) and "logs/" in key
    }
    failed = {"error": {"error": dict(zip(("code", "message"), job.failure, strict=True))}} if job.failure else {}
    return {"runId": job.name, "status": state, "logFiles": logs, **(failed if state == "Failed" else {})}


def _output_uris(job: Job) -> dict[str, str]:
    named = job.body["properties"].get("outputs") or {}
    return {
        "default": f"workspaceartifactstore/paths/{_ARTIFACTS.format(job.name)}",
        **{name: f"workspaceblobstore/paths/azureml/{job.name}/{name}/" for name in named},
    }


def _resolved(workspace: Workspace, identity: str) -> dict[str, str]:
    job, name = identity.split(":")
    location = _output_uris(workspace.jobs[job])[name]
    scope = workspace.id.replace("/providers/Microsoft.MachineLearningServices", "").lstrip("/")
    return {"uri": f"azureml://{scope}/datastores/{location}", "type": "uri_folder"}
